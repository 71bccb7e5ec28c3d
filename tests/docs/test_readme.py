"""The README does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs_lib.cli.main import cli

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    """The code blocks of the README in one language."""
    text = README.read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.guarantee("U3")
def test_the_code_of_the_readme_runs_and_prints_what_is_shown(
    tmp_path, database_url, run_process
):
    (code,) = blocks("python")
    assert code.startswith("# shop.py\n")
    written = [line for line in code.splitlines() if line.strip()]
    assert len(written) <= 20, "more than the 20 lines that a reader is promised"
    (tmp_path / "shop.py").write_text(code)
    env = {"PYTHONPATH": f".:{tmp_path}", "JOBS_LIB_DATABASE_URL": database_url}
    commands = [
        line.split("#")[0].split()
        for block in blocks("sh")
        for line in block.splitlines()
    ]
    assert ["python", "shop.py"] in commands
    placed = run_process(str(tmp_path / "shop.py"), env=env)
    assert placed.wait() == 0, placed.output
    (command,) = [line[1:] for line in commands if line[:2] == ["jobs-lib", "run"]]
    service = run_process("-m", "jobs_lib.cli", *command, env=env)
    section = README.read_text(encoding="utf-8").split("## In your code")[1]
    (shown,) = re.findall(r"```\n\n```\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    service.wait_for_line(shown.strip())
    assert service.lines == shown.splitlines()


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
