"""Each folder of tests has a budget of CPU seconds, so that the whole run stays quick.

The table is `[tool.jobs_lib.test_budgets]` in pyproject.toml. The CPU time of the
tests' process counts, and that of every process that it has started, servers too. A
busy machine delays a test, but hardly adds to its CPU time. Tests marked `slow` do not
count: the everyday run leaves them out. The report names a folder that exceeds its
budget; no run fails because of it.
"""

from __future__ import annotations

import os
import tomllib
from collections import defaultdict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

#: The budget of a folder that is not in the table.
DEFAULT_BUDGET = 10.0

_TICKS = os.sysconf("SC_CLK_TCK")


def read_cpu(root: int | None = None) -> float:
    """The CPU seconds of a process, this one by default, and of all processes below it.

    An ended process counts with its parent. Without `/proc`, only ended processes
    of this one count.
    """
    seconds: dict[int, float] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may hold any text. State and parent follow it.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        pid = int(stat.parent.name)
        children[int(fields[1])].append(pid)
        seconds[pid] = sum(map(int, fields[11:15])) / _TICKS
    if not seconds:
        return sum(os.times()[:4])
    total, found = 0.0, [os.getpid() if root is None else root]
    while found:
        pid = found.pop()
        total += seconds.get(pid, 0.0)
        found += children[pid]
    return total


class Budgets:
    """A pytest plugin that adds up the CPU seconds of each folder.

    The process that runs tests measures them. It measures a series of tests of one
    folder at a time, since a look at all processes takes time. The report of the last
    test of a series carries the figure to the process that adds up.
    """

    def __init__(self, budgets: dict[str, float]) -> None:
        self.budgets = budgets
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._began: float | None = None
        self._is_last = False

    @classmethod
    def read(cls, pyproject: Path) -> Budgets:
        """Read the budgets of the project."""
        tool = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]
        return cls(tool["jobs_lib"]["test_budgets"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> None:
        """Begin to measure, and note whether this test is the last of its series."""
        if self._began is None:
            self._began = read_cpu()
        self._is_last = nextitem is None or _series(nextitem) != _series(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        """Add what a series took to the report of its last test."""
        report = yield
        if call.when == "teardown" and self._is_last and self._began is not None:
            now = read_cpu()
            if _series(item)[1]:
                report.cpu_seconds = now - self._began
            self._began = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add what a series took to its folder."""
        seconds = getattr(report, "cpu_seconds", None)
        if seconds is not None:  # a folder may take less than a tick
            self.spent[_folder(report.nodeid)] += seconds

    def budget(self, folder: str) -> float:
        """The CPU seconds that a folder may take."""
        return self.budgets.get(folder, DEFAULT_BUDGET)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Print how much of its budget each folder took."""
        if not self.spent:
            return
        terminalreporter.section("CPU seconds by folder")
        for folder, seconds in sorted(self.spent.items()):
            budget = self.budget(folder)
            too_long = "  too long" if seconds > budget else ""
            terminalreporter.line(
                f"{folder:12} {seconds:7.1f} of {budget:5.0f}{too_long}"
            )
        total = sum(self.spent.values())
        terminalreporter.line(f"{'all':12} {total:7.1f}")


def _folder(nodeid: str) -> str:
    parts = PurePath(nodeid.split("::")[0]).parts
    return parts[1] if len(parts) > 2 else "tests"


def _series(item: pytest.Item) -> tuple[str, bool]:
    """The folder of a test, and whether its time counts."""
    return _folder(item.nodeid), item.get_closest_marker("slow") is None
