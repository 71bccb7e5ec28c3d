"""The hooks before a commit and the workflow after a push run what `make` runs."""

from __future__ import annotations

import os

import pytest
import yaml

from scripts.links import dead_links, markdown_files
from tests.support.pages import ROOT


def test_the_workflow_runs_the_script_that_a_change_must_pass():
    text = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    steps = yaml.safe_load(text)["jobs"]["test"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands == [".ci/run"]
    assert os.access(ROOT / commands[0], os.X_OK)


def test_each_hook_is_a_part_of_make_check():
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (local,) = yaml.safe_load(text)["repos"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    check = makefile.split("\ncheck:")[1].split("\n\n")[0]
    check = check.replace("$(BIN)", ".venv/bin")
    for hook in local["hooks"]:
        assert hook["entry"].removesuffix(" --force-exclude") in check, hook


@pytest.mark.guarantee("U5")
def test_every_link_of_every_page_leads_somewhere():
    pages = [*markdown_files(ROOT)]
    assert ROOT / "README.md" in pages
    assert [line for page in pages for line in dead_links(page, ROOT)] == []
