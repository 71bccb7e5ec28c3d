"""Both type checkers refuse the wrong uses of the public interface, and only those."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USES = Path(__file__).with_name("uses.py")


def run(*command: str) -> str:
    """Return what a checker prints about the uses; its exit code is 1 for errors."""
    done = subprocess.run(
        [sys.executable, "-m", *command, str(USES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done
    return done.stdout


def mypy() -> dict[int, str]:
    """The errors of mypy, by line."""
    found = re.finditer(r"uses\.py:(\d+): error: (.*)", run("mypy"))
    return {int(error[1]): error[2] for error in found}


def pyright() -> dict[int, str]:
    """The errors of pyright, by line."""
    output = run("pyright", "--pythonpath", sys.executable, "--outputjson")
    return {
        error["range"]["start"]["line"] + 1: error["message"]
        for error in json.loads(output)["generalDiagnostics"]
        if error["severity"] == "error"
    }


@pytest.mark.guarantee("J30")
@pytest.mark.parametrize("check", [mypy, pyright])
def test_wrong_uses_are_errors_and_right_ones_are_not(check):
    lines = USES.read_text(encoding="utf-8").splitlines()
    wrong = {n for n, line in enumerate(lines, 1) if line.endswith("# error")}
    errors = check()
    unexpected = {n: errors[n] for n in errors.keys() - wrong}
    missed = {n: lines[n - 1] for n in wrong - errors.keys()}
    assert (unexpected, missed) == ({}, {})
