"""What is in memory is applied before a partition looks for a place to go on."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import Mock
from uuid import UUID, uuid4

import pytest

from jobs_lib.consuming.consumer import Consumer
from jobs_lib.consuming.looks import Looks
from jobs_lib.consuming.progress import Progress
from jobs_lib.consuming.recovery import Recovery
from tests.support.apps import heard
from tests.support.fake_records import fake_record


@pytest.fixture
def recovery() -> Recovery:
    """A recovery of a handler that stops where records are gone."""
    declared = Mock()
    declared.may_pass.return_value = False
    offsets = Mock()
    offsets.find_replaced.return_value = offsets.find_ended.return_value = set()
    lock: Any = Mock(__enter__=Mock(), __exit__=Mock())
    read_ids = Mock(return_value={"orders": uuid4()})
    return Recovery(
        Mock(), {"orders": declared}, offsets, Mock(), read_ids, lock, Mock()
    )


@pytest.fixture
def progress() -> Progress:
    """A partition with a record in memory, whose next ones are gone."""
    progress = Progress(("orders", 0), epoch=1, stored=10)
    progress.waiting.append(fake_record(10))
    progress.range = (25, 30)
    return progress


def test_records_in_memory_go_in_although_the_log_has_lost_them(recovery, progress):
    with heard("offset.lost") as lost:
        assert recovery.settle(Mock(), progress)
    assert not lost
    assert len(progress.waiting) == 1
    assert progress.range == (25, 30)


def test_the_gap_is_told_once_nothing_is_left_in_memory(recovery, progress):
    progress.waiting.clear()
    with heard("offset.lost") as lost:
        assert not recovery.settle(Mock(), progress)
    ((_, fields),) = lost
    assert (fields["next_offset"], fields["start"], fields["end"]) == (10, 25, 30)


@pytest.mark.parametrize("settled", ["range", "replaced"])
def test_a_partition_that_can_go_on_is_no_longer_said_to_stand_still(
    recovery, progress, settled
):
    progress.waiting.clear()
    # Its records are there again, or its topic is the one that it was.
    progress.range = (5, 30) if settled == "range" else None
    progress.replaced = settled == "replaced"
    recovery._offsets.read.return_value = {progress.partition: 10}
    connection = Mock()
    assert not recovery.settle(connection, progress)
    recovery._failures.clear.assert_called_once_with(connection, progress)
    recovery._member.begin.assert_called_once_with(progress.partition, 10)


def test_a_topic_that_was_made_anew_stays_so_while_kafka_names_no_id(
    recovery, progress
):
    progress.waiting.clear()
    progress.range, progress.replaced, progress.topic_id = None, True, uuid4()
    before = progress.topic_id
    recovery._read_ids.return_value = {}
    assert not recovery.settle(Mock(), progress)
    assert (progress.replaced, progress.topic_id) == (True, before)
    assert not progress.is_ready(time.monotonic())
    recovery._member.begin.assert_not_called()
    recovery._commits.note.assert_not_called()


def test_a_group_without_an_offset_begins_with_the_oldest_record(recovery, progress):
    progress.waiting.clear()
    progress.stored = None
    with heard("offset.lost") as lost:
        assert not recovery.settle(Mock(), progress)
    assert not lost
    assert progress.range is None
    recovery._member.begin.assert_called_once_with(progress.partition, 25)


@pytest.mark.parametrize("waits", [True, False])
def test_what_waits_is_applied_before_a_group_without_an_offset_goes_on(
    progress, waits
):
    progress.stored = progress.range = None
    if not waits:
        progress.waiting.clear()
    consumer = Consumer.__new__(Consumer)
    member: Any = Mock()
    consumer._changed, consumer._member = threading.Condition(), member
    consumer._partitions = {progress.partition: progress}
    consumer.out_of_range(progress.partition, 25, 30)
    assert progress.range == ((25, 30) if waits else None)
    assert member.begin.called is not waits


@pytest.mark.parametrize("known", [None, UUID(int=1), UUID(int=2)])
def test_a_topic_is_looked_at_again_if_its_id_is_new(progress, known):
    progress.topic_id = known
    commits, ids = Mock(), Mock(poll=Mock(return_value={"orders": UUID(int=2)}))
    partitions = {progress.partition: progress}
    offsets = Mock(read=Mock(return_value={progress.partition: 10}))
    looks = Looks(offsets, ids, partitions, threading.Condition(), commits, 0.0)
    looks.look(Mock())
    assert progress.replaced is (known != UUID(int=2))
    # That it is another one is sure only if it had one before.
    assert commits.note_anew.called is (known == UUID(int=1))


def test_a_partition_that_had_ended_goes_on_where_somebody_has_set_it(
    recovery, progress
):
    progress.waiting.clear()
    progress.ended, progress.range = True, (5, 30)
    # The note names the offset before, so it is none of this partition any more.
    recovery._failures.has_noted.return_value = True
    recovery._offsets.read.return_value = {progress.partition: 7}
    assert not recovery.settle(Mock(), progress)
    recovery._member.begin.assert_not_called()
    recovery._offsets.make.return_value = {progress.partition: 7}
    with heard("offset.moved"):
        recovery.settle(Mock(), progress)
    recovery._member.begin.assert_called_once_with(progress.partition, 7)


@pytest.mark.parametrize("noted", [True, False])
def test_a_partition_that_had_ended_goes_on_once_its_note_is_taken_away(
    recovery, progress, noted
):
    progress.waiting.clear()
    progress.ended, progress.range = True, (5, 30)
    recovery._failures.has_noted.return_value = True
    recovery._offsets.read.return_value = {progress.partition: 10}
    found = {progress.partition} if noted else set()
    recovery._offsets.find_ended.return_value = found
    with heard("offset.lost") as lost:
        assert not recovery.settle(Mock(), progress)
    assert bool(lost) is noted
    assert recovery._member.begin.called is not noted
    assert progress.ended is noted
    # Others wait for what Kafka has: nothing, until it goes on.
    assert recovery._commits.note_anew.called is noted
    assert recovery._commits.note.called is not noted


def test_a_partition_that_had_ended_stays_so_when_its_topic_is_the_one_that_it_was(
    recovery, progress
):
    progress.waiting.clear()
    progress.range, progress.replaced = None, True
    recovery._offsets.read.return_value = {progress.partition: 10}
    recovery._offsets.find_ended.return_value = {progress.partition}
    assert not recovery.settle(Mock(), progress)
    assert (progress.replaced, progress.ended) == (False, True)
    recovery._commits.note_anew.assert_called_once_with(progress.partition)
    recovery._commits.note.assert_not_called()


def queue(progress: Progress, *offsets: int) -> None:
    """Let records with these offsets wait."""
    progress.range = None
    progress.waiting.clear()
    progress.waiting.extend(fake_record(at) for at in offsets)


def test_who_sets_the_offset_of_a_failing_record_need_not_wait_for_its_next_try(
    recovery, progress
):
    queue(progress, 10, 11, 12)
    recovery._offsets.make.return_value = {progress.partition: 10}
    progress.failures, progress.retry_at = 9, time.monotonic() + 60
    assert not progress.is_ready(time.monotonic())
    progress.in_doubt = True
    assert progress.is_ready(time.monotonic())
    # Nobody has: it is tried again when it is due.
    assert not recovery.settle(Mock(), progress)
    assert not progress.is_ready(time.monotonic())
    progress.in_doubt = True
    recovery._offsets.make.return_value = {progress.partition: 11}
    with heard("offset.moved") as moved:
        assert recovery.settle(Mock(), progress)
    ((_, fields),) = moved
    assert (fields["before"], fields["next_offset"]) == (10, 11)
    assert [one.offset() for one in progress.waiting] == [11, 12]


@pytest.mark.parametrize(("stored", "told"), [(10, 0), (12, 0), (13, 1)])
def test_a_commit_whose_answer_was_lost_is_no_offset_that_somebody_has_set(
    recovery, progress, stored, told
):
    queue(progress, 10, 11, 12, 13, 14)
    progress.in_doubt, progress.unsure_until = True, 12
    recovery._offsets.make.return_value = {progress.partition: stored}
    with heard("offset.moved") as moved:
        assert recovery.settle(Mock(), progress)
    assert len(moved) == told
    assert progress.stored == stored
