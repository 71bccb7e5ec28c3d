"""The page of guarantees comes from the marks of tests."""

from __future__ import annotations

import textwrap
import tomllib
from pathlib import Path

import pytest

from scripts import guarantees, page


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with two guarantees, and a function that writes its test file."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "docs" / "guarantees.toml").write_text(
        '[a]\ntitle = "Things"\n[a.sentences]\nA1 = "It holds."\nA2 = "It | lasts."\n'
    )
    monkeypatch.setattr(guarantees, "ROOT", tmp_path)
    monkeypatch.setattr(guarantees, "DOCS", tmp_path / "docs")

    def run(test: str, *arguments: str) -> int:
        (tmp_path / "tests" / "test_it.py").write_text(textwrap.dedent(test))
        monkeypatch.setattr("sys.argv", ["guarantees", *arguments])
        return guarantees.main()

    return tmp_path, run


SHOWN = """
    @pytest.mark.guarantee("A2")
    def test_it_lasts_long(): ...

    def test_of_nothing(): ...
"""


def test_the_page_lists_only_guarantees_that_a_test_shows(project):
    root, run = project
    assert run(SHOWN) == 0
    written = (root / "docs" / "guarantees.md").read_text(encoding="utf-8")
    assert "## Things" in written
    assert "| A2 | It \\| lasts. | [it lasts long](../tests/test_it.py) |" in written
    assert "A1" not in written


def test_the_page_marks_tests_that_the_everyday_run_leaves_out(project):
    root, run = project
    code = run("""
        needs = pytest.mark.skipif(True, reason="no such program")

        @pytest.mark.slow
        @pytest.mark.guarantee("A1", "A2")
        def test_slow(): ...

        @needs
        @pytest.mark.guarantee("A2")
        def test_skipped(): ...

        @pytest.mark.guarantee("A2")
        def test_quick(): ...
    """)
    assert code == 0
    written = (root / "docs" / "guarantees.md").read_text(encoding="utf-8")
    assert "Shown only by tests with the mark *slow*: A1.\n" in written
    assert "| A1 | It holds. | [slow](../tests/test_it.py) *slow* |" in written
    assert "[skipped](../tests/test_it.py) *no such program*<br>" in written
    assert "[quick](../tests/test_it.py) |" in written


def test_the_page_knows_a_mark_that_a_module_of_the_tests_keeps(project):
    root, run = project
    (root / "tests" / "support").mkdir()
    (root / "tests" / "support" / "programs.py").write_text(
        'NEEDS = pytest.mark.skipif(True, reason="no such program")\n'
    )
    code = run("""
        from tests.support.programs import NEEDS as NEEDED

        @NEEDED
        @pytest.mark.guarantee("A1")
        def test_skipped(): ...
    """)
    assert code == 0
    written = (root / "docs" / "guarantees.md").read_text(encoding="utf-8")
    assert "Shown only by tests with the mark *no such program*: A1.\n" in written


def test_the_check_fails_for_an_outdated_page(project, capsys):
    _, run = project
    assert run(SHOWN, "--check") == 1
    assert "make docs" in capsys.readouterr().err
    assert run(SHOWN) == 0
    assert run(SHOWN, "--check") == 0


def test_an_id_without_a_sentence_is_an_error(project, capsys):
    _, run = project
    assert run('@pytest.mark.guarantee("A3")\ndef test_x(): ...\n') == 1
    assert "test_x names 'A3': no such id" in capsys.readouterr().err


def test_more_than_four_ids_on_a_test_are_an_error(project, capsys):
    _, run = project
    ids = ", ".join(['"A1"'] * 5)
    assert run(f"@pytest.mark.guarantee({ids})\ndef test_x(): ...\n") == 1
    assert "names 5 guarantees, 4 at most" in capsys.readouterr().err


def test_every_guarantee_has_one_sentence():
    root = Path(page.ROOT)
    text = (root / "docs" / "guarantees.toml").read_text(encoding="utf-8")
    areas = tomllib.loads(text)
    ids = [one for area in areas.values() for one in area["sentences"]]
    assert len(ids) == len(set(ids))
    for area in areas.values():
        for sentence in area["sentences"].values():
            assert sentence.endswith(".")
            assert len(sentence) < 130
