"""Tests run many times beside busy processes, and these never outlive the run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.stress import busy, run, stress
from tests.support.pages import ROOT

# This test notes the order in which pytest runs its tests: the order shows the seed.
COUNTED = """
import pathlib, pytest

RUNS = pathlib.Path(__file__).with_name("runs")

@pytest.mark.parametrize("n", range(20))
def test_counted(n):
    with RUNS.open("a") as file:
        file.write(f"{n} ")

def test_fails_in_the_third_run():
    with RUNS.open("a") as file:
        file.write("| ")
    assert RUNS.read_text().count("|") != 3, "the third"
"""
WAITS = """
import pathlib, threading

def test_waits():
    pathlib.Path(__file__).with_name("waits").touch()
    threading.Event().wait()
"""


def children(parent: int) -> set[int]:
    """The processes that a process has started and that still run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, owner = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has ended meanwhile
        if int(owner) == parent and state != "Z":
            found.add(int(stat.parent.name))
    return found


def runs(pid: int) -> bool:
    """Tell whether a process exists and is no zombie."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch):
    """Pytest starts in half the time without the plugins that are not needed here."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_randomly")


@pytest.fixture
def counted(tmp_path):
    file = tmp_path / "test_counted.py"
    file.write_text(COUNTED, encoding="utf-8")
    return file


def test_all_runs_are_counted(counted, capsys):
    assert stress([str(counted)], 2) == 0
    assert capsys.readouterr().out.endswith("2 of 2 runs passed.\n")
    assert (counted.parent / "runs").read_text().count("|") == 2


def test_the_first_run_that_fails_ends_all_and_tells_its_seed(counted, capsys):
    assert stress([str(counted)], 9) == 1
    out = capsys.readouterr().out
    assert "assert 3 != 3" in out
    assert "AssertionError: the third" in out
    assert out.endswith("2 of 9 runs passed.\n")
    # The same order again shows that the reported seed is that of the run.
    noted = counted.parent / "runs"
    order = noted.read_text().replace("|", "").split()[40:]
    noted.unlink()
    [command] = re.findall(r"^Run 3 failed .*: pytest (.*)$", out, re.MULTILINE)
    assert run([sys.executable, "-m", "pytest", *command.split()])[0] == 0
    assert noted.read_text().replace("|", "").split() == order
    assert sorted(map(int, order)) == [*range(20)]


def test_a_run_without_tests_does_not_pass(tmp_path, capsys):
    assert stress([str(tmp_path)], 2) == pytest.ExitCode.NO_TESTS_COLLECTED
    assert capsys.readouterr().out.endswith("0 of 2 runs passed.\n")


def test_busy_processes_end_with_the_block():
    with busy(2) as processes:
        ids = {process.pid for process in processes}
        assert ids <= children(os.getpid())
    assert not any(map(runs, ids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_busy_processes_end_with_the_script(tmp_path, wait_for, number):
    file = tmp_path / "test_waits.py"
    file.write_text(WAITS, encoding="utf-8")
    script = subprocess.Popen(
        [sys.executable, "-m", "scripts.stress", "--busy", "2", str(file)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    started = set()
    try:
        wait_for((tmp_path / "waits").exists, timeout=60, what="the test runs")
        started = children(script.pid)
        assert len(started) == 3, "two busy processes and pytest"
        script.send_signal(number)
        script.wait(timeout=60)
        # After SIGKILL nothing can stop pytest: it ends with its tests.
        left = started - ({pytest_of(started)} if number == signal.SIGKILL else set())
        wait_for(lambda: not any(map(runs, left)), what="all have ended")
    finally:
        script.kill()
        script.wait()
        for pid in filter(runs, started):
            os.kill(pid, signal.SIGKILL)


def pytest_of(started: set[int]) -> int:
    [pid] = [
        pid
        for pid in started
        if "\0pytest\0" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    return pid
