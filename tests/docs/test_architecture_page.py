"""The page of the architecture describes the folders and the functions."""

from __future__ import annotations

import configparser
import importlib
import re

from tests.support.pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STEP = re.compile(r"^\d+\. `([\w/]+)\.py` `([\w.]+)`:", re.MULTILINE)
NUMBERED = re.compile(r"^\d+\. ", re.MULTILINE)
PATH = re.compile(r"`((?:jobs_lib|spark_bridge|migrations)/[\w/.]*)`")


def find_layers() -> list[set[str]]:
    """The layers of the linter's contract, from the top to the bottom."""
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter")
    lines = contract["importlinter:contract:layers"]["layers"].split("\n")
    return [
        {name.strip().removeprefix("jobs_lib.") for name in line.split("|")}
        for line in lines
        if line.strip()
    ]


def test_each_step_of_a_journey_is_a_function_of_that_file():
    steps = STEP.findall(PAGE)
    assert len(steps) == len(NUMBERED.findall(PAGE)) > 30
    for path, name in steps:
        found = importlib.import_module(path.replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found), (path, name)


def test_each_path_of_the_page_is_there():
    paths = PATH.findall(PAGE)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_plan_of_the_page_equals_the_layers_of_the_linter():
    plan = PAGE.split("```")[1].strip().split("\n")
    names = (re.split(r"  +", line)[0].split("·") for line in plan)
    assert [{name.strip() for name in line} for line in names] == find_layers()


def test_each_folder_and_module_of_the_library_is_in_a_layer():
    layers = set().union(*find_layers())
    found = {
        path.stem
        for path in (ROOT / "jobs_lib").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert found - layers == {"__init__", "sql"}


def test_each_word_of_the_glossary_is_one_of_the_code():
    table = PAGE.split("## Words")[1]
    words = re.findall(r"^\| `([\w ]+)` \|", table, re.MULTILINE)
    assert 20 <= len(words) <= 30
    assert words == sorted(words)
    code = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "jobs_lib").rglob("*.py")
    )
    missing = [
        word
        for word in words
        if not re.search(rf"\b{word.split()[0]}", code, re.IGNORECASE)
    ]
    assert missing == []
