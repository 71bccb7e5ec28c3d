"""Each folder of tests has a budget of seconds, so that the whole stays quick.

The table is `[tool.jobs_lib.test_budgets]` in pyproject.toml. Tests marked `slow` do
not count: they are not part of the everyday run. The seconds are those of an idle
machine. A busy one takes several times as long, so a budget is told, and fails no run.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

#: Of a folder that is not in the table.
DEFAULT_BUDGET = 30.0


class Budgets:
    """A pytest plugin that adds up the seconds of each folder."""

    def __init__(self, budgets: dict[str, float]) -> None:
        self.budgets = budgets
        self.spent: defaultdict[str, float] = defaultdict(float)

    @classmethod
    def read(cls, pyproject: Path) -> Budgets:
        """The budgets of the project."""
        tool = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]
        return cls(tool["jobs_lib"]["test_budgets"])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test's set-up, call or tear-down to its folder."""
        parts = PurePath(report.nodeid.split("::")[0]).parts
        if len(parts) > 2 and "slow" not in report.keywords:
            self.spent[parts[1]] += report.duration

    def budget(self, folder: str) -> float:
        """The seconds that a folder may take."""
        return self.budgets.get(folder, DEFAULT_BUDGET)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Print what each folder took of its budget."""
        if not self.spent:
            return
        terminalreporter.section("seconds by folder")
        for folder, seconds in sorted(self.spent.items()):
            budget = self.budget(folder)
            too_long = "  too long" if seconds > budget else ""
            terminalreporter.line(
                f"{folder:12} {seconds:7.1f} of {budget:5.0f}{too_long}"
            )
        total = sum(self.spent.values())
        terminalreporter.line(f"{'all':12} {total:7.1f}")
