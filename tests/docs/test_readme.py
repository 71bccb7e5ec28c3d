"""The README does what it says."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jobs_lib.cli import cli

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    """The code blocks of the README in one language."""
    text = README.read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.guarantee("U3")
def test_the_code_of_the_readme_runs(
    tmp_path, database_url, connect, monkeypatch, run_process
):
    (code,) = blocks("python")
    assert code.startswith("# shop.py\n")
    written = [line for line in code.splitlines() if line.strip()]
    assert len(written) <= 20, "more than the 20 lines that a reader is promised"
    (tmp_path / "shop.py").write_text(code)
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    monkeypatch.syspath_prepend(tmp_path)
    admin = connect(autocommit=True)
    admin.execute("create table orders (id int, customer text)")
    shop: Any = importlib.import_module("shop")
    try:
        for order in (1, 2):
            shop.place_order("ada", order)
    finally:
        del sys.modules["shop"]
    (command,) = [
        line.split("#")[0].split()[1:]
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("jobs-lib run")
    ]
    service = run_process(
        "-m", "jobs_lib.cli", *command, env={"PYTHONPATH": f".:{tmp_path}"}
    )
    service.wait_for_line("invoice for order 1 to ada")
    service.wait_for_line("invoice for order 2 to ada")
    assert service.lines == [f"invoice for order {n} to ada" for n in (1, 2)]


def test_every_command_of_the_readme_exists():
    commands = {
        match.strip()
        for match in re.findall(r"jobs-lib ([a-z]+(?: [a-z]+)?)", README.read_text())
    }
    assert commands
    for command in commands:
        words = command.split()
        result = CliRunner().invoke(cli, [words[0], "--help"])
        assert result.exit_code == 0, command
        if "COMMAND" in result.output and len(words) > 1:
            result = CliRunner().invoke(cli, [*words[:2], "--help"])
            assert result.exit_code == 0, command


def test_every_make_target_of_the_readme_exists():
    targets = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", README.read_text(), re.MULTILINE):
        assert f"\n{target}:" in targets


def test_the_facts_of_the_demo_are_those_that_it_checks():
    checks = (README.parent / "examples/flights/checks.py").read_text()
    facts = re.findall(r"^✔ (.+?)  ", README.read_text(), re.MULTILINE)
    assert len(facts) == 5
    for fact in facts:
        assert f'"{fact}"' in checks, fact
