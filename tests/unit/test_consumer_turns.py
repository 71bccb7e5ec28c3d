"""Which partition a thread of a consumer takes next, and when it takes none."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from jobs_lib.consuming.progress import Progress
from jobs_lib.consuming.queues import Queues


@pytest.fixture
def queues() -> Queues:
    """Two partitions, each with a record."""
    queues = Queues(None, 1_000_000)  # type: ignore[arg-type]
    waiting: Any = object()
    for number in (0, 1):
        progress = Progress(("topic", number), 1, 0, reading=True)
        progress.waiting.append(waiting)
        queues.partitions["topic", number] = progress
    return queues


def finish(queues: Queues, progress: Progress, *, worked: float) -> None:
    """End a block of ten records that took a second."""
    progress.adapt(10, 1.0, worked, 10.0)
    queues.give_back(progress)


def test_handlers_that_wait_run_side_by_side(queues):
    first, second = queues.take(), queues.take()
    assert {first.partition, second.partition} == {("topic", 0), ("topic", 1)}
    for progress in (first, second):
        finish(queues, progress, worked=0.3)
    assert queues.take()
    assert queues.take()


def test_blocks_that_keep_a_thread_busy_have_one_thread(queues):
    first, second = queues.take(), queues.take()
    for progress in (first, second):
        finish(queues, progress, worked=0.9)
    busy = queues.take()
    assert queues.take() is None
    finish(queues, busy, worked=0.9)
    assert queues.take() is not None


def test_a_busy_block_that_takes_long_keeps_no_other_waiting(queues):
    first, second = queues.take(), queues.take()
    for progress in (first, second):
        finish(queues, progress, worked=0.9)
    busy = queues.take()
    busy.taken_at -= 1.0
    other = queues.take()
    assert other is not None
    assert other is not busy


def test_a_handler_that_begins_to_wait_is_not_kept_alone(queues):
    first, second = queues.take(), queues.take()
    for progress in (first, second):
        finish(queues, progress, worked=0.9)
    finish(queues, queues.take(), worked=0.1)
    waiting = next(one for one in (first, second) if not one.competes)
    assert {queues.take(), queues.take()} == {first, second}
    assert waiting.busy


def test_records_that_come_twice_are_queued_once(queues):
    def make(*offsets: int) -> list[Any]:
        return [
            MagicMock(
                topic=MagicMock(return_value="topic"),
                partition=MagicMock(return_value=0),
                offset=MagicMock(return_value=offset),
                __len__=MagicMock(return_value=1),
            )
            for offset in offsets
        ]

    progress = queues.partitions["topic", 0]
    progress.waiting.clear()
    progress.stored = 3
    for offsets in ((2, 3, 4), (3, 4, 5), (6,)):
        queues.add(make(*offsets))
    assert [one.offset() for one in progress.waiting] == [3, 4, 5, 6]
