"""Turns end if nothing waits, or if there are too many of them."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock
from uuid import UUID

import pytest

from jobs_lib.executor.lane import ClaimedJob, Finished, Lane
from jobs_lib.executor.limiting.turn import Line, Turn
from jobs_lib.executor.running.event_loop import AsyncWorkers
from jobs_lib.executor.running.threads import ThreadWorkers
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


class Interrupted:
    """Takes the place of a runner: an error from outside ends the thread."""

    has_batches = False

    def run(self, job: ClaimedJob) -> None:
        """Raise, as if the handler were interrupted."""
        raise KeyboardInterrupt

    def fail(self, job: ClaimedJob, error: BaseException) -> None:
        """Do nothing when the attempt fails."""


@pytest.fixture
def lane():
    """A lane of jobs without a group."""
    return Lane("local/0", 1, None, 1, UUID(int=1), Finished())


def test_a_turn_ends_when_an_error_ends_its_thread(line, ends, lane):
    runner: Any = Interrupted()
    workers = ThreadWorkers(1, runner, {}, lambda: None, lambda lane: None)
    line.waiting.append(make_claimed(lane))
    workers.put([line.turn])
    with pytest.raises(KeyboardInterrupt):
        workers._work_off()
    assert ends == [("a", True)]
    assert not workers._queue.turns


class Quick(Interrupted):
    """Takes the place of a runner: its handlers await nothing."""

    async def run_async(self, job: ClaimedJob) -> None:
        """Complete the job."""


def test_a_turn_of_a_task_lets_others_have_the_event_loop(line, lane):
    runner: Any = Quick()
    workers = AsyncWorkers(1, runner, {}, Mock(), Mock(), AsyncMock())
    line.waiting.extend(make_claimed(lane) for _ in range(3_000))
    workers._queue.put([line.turn], first=False)

    async def count_breaks() -> int:
        work = asyncio.create_task(workers._work_off())
        breaks = 0
        while line.waiting:
            await asyncio.sleep(0)
            breaks += 1
        work.cancel()
        return breaks

    # One after each fifty jobs, although nothing else waits.
    assert asyncio.run(count_breaks()) == 60
