"""The marks of a cursor stay in order, for any answer at any time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jobs_lib.executor.claiming import late_commits as module
from jobs_lib.executor.claiming.group_starts import GroupStarts
from jobs_lib.executor.claiming.in_flight import InFlight
from jobs_lib.executor.claiming.late_commits import LateCommits
from jobs_lib.executor.claiming.rows import JumpRow
from jobs_lib.executor.claiming.windows import Windows

ORIGIN = "local/0"
IDS = st.integers(1, 40)
FLAGS = st.booleans()


class Marks(RuleBasedStateMachine):
    """One origin: windows and jumps move the cursor, and the sweep goes behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0
        self.patch = pytest.MonkeyPatch()
        clock = SimpleNamespace(monotonic=lambda: self.now)
        self.patch.setattr(module, "time", clock)
        self.patch.setattr(module, "SLICE", 4)
        self.patch.setattr(module, "_SPAN", 6)
        self.following = 1
        self.running: set[int] = set()
        self.windows = Windows()
        self.windows.take({ORIGIN: 1})
        self.cursor = self.windows.cursors[ORIGIN]
        self.cursor.seen = self.cursor.may_have_more = True
        self.late_commits = LateCommits()

    @invariant()
    def marks_are_in_order(self) -> None:
        """The marks are in the order that the docstring of a cursor gives."""
        cursor = self.cursor
        assert 0 <= cursor.swept_below <= cursor.sweep_target
        assert cursor.sweep_target <= cursor.no_commits_below <= cursor.at
        if cursor.sweep_at:
            assert cursor.swept_below < cursor.sweep_at <= cursor.sweep_target
        for descent in (cursor.near, cursor.far):
            if descent.at:
                assert descent.floor < descent.at <= descent.top <= cursor.at

    @rule(ahead=st.none() | IDS, count=st.integers(0, 12), plain=FLAGS, barren=FLAGS)
    def claim(self, ahead, count, plain, barren) -> None:
        """Read a window; its answer may be ignored."""
        furthest = None if ahead is None else self.cursor.at + ahead
        self.look(furthest, count, plain=plain, barren=barren)
        self.jump_if_stuck(ahead or 1, found=barren)

    def look(self, furthest, count, *, plain: bool, barren: bool) -> None:
        if self.cursor.jump_factor == 1:
            self.windows.prepare([ORIGIN], 10)
            self.windows.note(ORIGIN, 0, furthest, count, plain=plain, barren=barren)

    def jump_if_stuck(self, ahead: int, *, found: bool) -> None:
        asked = self.windows.prepare_jump(self.windows.cursors, 10, [], GroupStarts())
        if asked:
            furthest = self.cursor.at + ahead
            ids = [furthest] if found else []
            row = JumpRow(ids, furthest, asked["limit"], [], [], [], [])
            self.windows.read_jump(asked, row, InFlight())

    @rule(
        passes=st.sampled_from([0.1, 0.6, 3.0, 61.0]),
        begins=st.integers(0, 3),
        ends=st.lists(st.integers(0, 5)),
        meanwhile=st.sampled_from(["", "claim", "rewind", "rewind and claim"]),
        share=st.floats(0, 1),
        count=st.integers(0, 5),
    )
    def sweep(self, passes, begins, ends, meanwhile, share, count) -> None:
        """Sweep; the cursor may move before the answer."""
        self.now += passes
        asked = self.late_commits.prepare(self.windows.cursors, [], InFlight())
        if "rewind" in meanwhile:
            self.windows.rewind()
        if "claim" in meanwhile:
            self.look(self.cursor.at + 30, 9, plain=True, barren=False)
        # Some transactions have ended, and some are new.
        self.running -= {sorted(self.running)[n] for n in ends if n < len(self.running)}
        self.running |= {*range(self.following, self.following + begins)}
        self.following += begins + 1
        self.answer(asked, share, count)

    def answer(self, asked, share: float, count: int) -> None:
        oldest = min(self.running, default=self.following)
        cursors = self.windows.cursors
        self.late_commits.note_horizon(oldest, self.following, self.running, cursors)
        if asked is None:
            return
        start, end = (int(asked[name].strip("{}")) for name in ("starts", "ends"))
        assert start < end
        rows: list[Any] = [(None, 0, None, None)]
        if count:
            lowest = end - int(share * (end - start - 1))
            rows.append((ORIGIN, lowest, None, count))
        self.late_commits.read(rows, cursors, InFlight(), GroupStarts())

    @rule()
    def rewind(self) -> None:
        """A pause has ended."""
        self.windows.rewind()

    def teardown(self) -> None:
        """Once every transaction has ended, the sweep covers all ids that were read."""
        try:
            self.running.clear()
            for _ in range(60):
                self.now += 3.0
                self.following += 1
                asked = self.late_commits.prepare(self.windows.cursors, [], InFlight())
                self.answer(asked, 0.0, 0)
                self.marks_are_in_order()
                if self.cursor.swept_below == self.cursor.at:
                    break
            assert self.cursor.swept_below == self.cursor.at
        finally:
            self.patch.undo()


TestMarks = Marks.TestCase
TestMarks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
