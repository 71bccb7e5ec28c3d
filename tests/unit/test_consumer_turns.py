"""Which partition a thread of a consumer takes next, and when it takes none."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from jobs_lib.consuming.progress import Progress
from jobs_lib.consuming.queues import Queues
from jobs_lib.consuming.share import Share
from jobs_lib.kafka import fullness
from tests.support.fake_records import fake_record


@pytest.fixture
def queues() -> Queues:
    """Two partitions, each with a record."""
    queues = Queues(None, 1_000_000)  # type: ignore[arg-type]
    for number in (0, 1):
        progress = Progress(("topic", number), 1, 0, reading=True)
        progress.waiting.append(fake_record(1))
        queues.partitions["topic", number] = progress
    return queues


def finish(
    queues: Queues, progress: Progress, *, worked: float, seconds: float = 1.0
) -> None:
    """End a block of ten records that took so long."""
    progress.adapt(10, seconds, worked, 10.0)
    queues.release(progress)


@pytest.fixture
def backlog(queues) -> Queues:
    """Two partitions of one topic, each with many records; nobody knows its handler."""
    share = Share()
    for progress in queues.partitions.values():
        progress.waiting *= 1_000
        progress.share = share
    return queues


def measure(queues: Queues, *, worked: float, blocks: int = 3) -> None:
    """Run some blocks of a tenth of a second, one after the other."""
    for _ in range(blocks):
        progress = queues.take()
        assert progress is not None
        finish(queues, progress, worked=worked, seconds=0.1)


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
    for _ in range(6):
        finish(queues, queues.take(), worked=0.1)
    waiting = next(one for one in (first, second) if not one.competes)
    assert {queues.take(), queues.take()} == {first, second}
    assert waiting.busy


def test_a_handler_that_nobody_knows_is_measured_alone_and_with_few_records(backlog):
    only = backlog.take()
    assert backlog.take() is None
    only.size = only.most = 5_000
    assert len(only.choose()) == 500
    finish(backlog, only, worked=0.09, seconds=0.1)
    assert len(only.choose()) == 1_000


def test_handlers_that_have_waited_alone_run_side_by_side(backlog):
    measure(backlog, worked=0.04)
    assert backlog.take()
    assert backlog.take()


def test_one_slow_commit_does_not_seem_to_be_a_handler_that_waits(backlog):
    measure(backlog, worked=0.09)
    measure(backlog, worked=0.01, blocks=2)
    assert backlog.take()
    assert backlog.take() is None


def test_threads_that_take_turns_are_not_taken_for_waiting(backlog):
    share = next(iter(backlog.partitions.values())).share
    measure(backlog, worked=0.04)
    # What each of them does has changed: each has half of the interpreter now.
    first, second = backlog.take(), backlog.take()
    share.measured_at -= 31.0
    for progress in (first, second):
        finish(backlog, progress, worked=0.05, seconds=0.1)
    assert share.is_busy is None
    measure(backlog, worked=0.09, blocks=1)
    assert backlog.take()
    assert backlog.take() is None


def test_a_block_beside_another_does_not_undo_what_is_known():
    share = Share()
    for is_alone in (True, True, False, True):
        share.note(10, 0.1, 0.01, is_alone=is_alone)
    assert share.is_busy is False


def test_single_records_of_a_handler_that_nobody_knows_run_side_by_side(queues):
    share = Share()
    for progress in queues.partitions.values():
        progress.share = share
    assert queues.take()
    assert queues.take()


def test_a_single_record_says_nothing_of_many(backlog):
    measure(backlog, worked=0.09)
    alone = backlog.take()
    alone.adapt(1, 0.1, 0.01, 10.0)
    assert alone.share.is_busy is None


def test_records_that_come_twice_are_queued_once(queues):
    progress = queues.partitions["topic", 0]
    progress.waiting.clear()
    progress.stored = 3
    for offsets in ((2, 3, 4), (3, 4, 5), (6,)):
        queues.add([fake_record(at) for at in offsets])
    assert [one.offset() for one in progress.waiting] == [3, 4, 5, 6]


@pytest.mark.parametrize("is_there", [True, False])
def test_only_what_the_log_may_have_yet_is_let_go(monkeypatch, is_there):
    monkeypatch.setattr(fullness, "_SECONDS", 0.0)
    queues = Queues(Mock(), 10_000)
    for number in (0, 1):
        queues.partitions["topic", number] = Progress(("topic", number), 1, 0)
    full, other = queues.partitions.values()
    full.push([fake_record(at, size=1_000) for at in range(9)])
    full.range = None if is_there else (20, 30)
    assert queues.has_room()
    assert len(full.waiting) == (2 if is_there else 9)
    # It does not keep the others waiting.
    assert full.paused
    assert not other.paused
    assert queues.has_room()
