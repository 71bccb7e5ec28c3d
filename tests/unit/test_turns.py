"""Turns end if nothing waits, or if there are too many of them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from jobs_lib.executor.lane import ClaimedJob, Finished, Lane
from jobs_lib.executor.limiting.turn import Line, Turn
from jobs_lib.executor.running.lane_runner import LaneRunner
from tests.support.claimed import make_claimed


@pytest.fixture
def ends():
    """The ends of turns, and whether each had to end."""
    return []


@pytest.fixture
def line(ends):
    """A line with a turn that ends whenever the turn asks to."""

    def end(at, must):
        ends.append((at.value, must))
        return True

    line = Line("a", end, is_async=False)
    line.turns = line.allowed = 1
    return line


def test_a_turn_takes_the_waiting_jobs_and_ends(line, ends):
    line.waiting.extend(["first", "second"])
    turn = line.turn
    assert [turn.take(), turn.take(), turn.take()] == ["first", "second", None]
    assert ends == [("a", False)]
    assert line.ran == 2


def test_a_turn_goes_on_with_a_job_that_came_before_its_end(line):
    late: Any = object()

    def end(at, must):
        at.waiting.append(late)
        return False

    assert Turn(line, end, is_async=False).take() is late


def test_a_turn_ends_before_its_next_job_where_there_are_too_many(line, ends):
    line.waiting.append("first")
    line.allowed = 0
    assert line.turn.take() is None
    assert ends == [("a", True)]
    assert [*line.waiting] == ["first"]


def test_a_turn_counts_as_long_after_fifty_jobs(line):
    assert [line.turn.is_long() for _ in range(100)].index(True) == 49


class Unused:
    """Takes the place of a runner that runs nothing."""

    has_batches = False

    def fail(self, job: ClaimedJob, error: BaseException) -> None:
        """Do nothing when the attempt fails."""


def test_a_turn_ends_when_an_error_ends_its_worker(line, ends):
    runner: Any = Unused()
    lanes: LaneRunner[int] = LaneRunner(
        runner, {}, lambda lane: None, lambda: None, is_async=False
    )
    job = make_claimed(Lane("local/0", 1, None, 1, UUID(int=1), Finished()))
    line.waiting.append(job)
    lanes.put([line.turn], first=False)
    decisions = lanes.decide(1)
    assert next(decisions) is job
    with pytest.raises(KeyboardInterrupt):
        decisions.throw(KeyboardInterrupt())
    assert ends == [("a", True)]
    assert not lanes.turns
