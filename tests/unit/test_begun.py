"""A partition is read from where it is to go on, whatever happens before it begins."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from confluent_kafka import TopicPartition

from jobs_lib.consuming.consumer import Consumer
from jobs_lib.consuming.progress import Progress, get_offset
from jobs_lib.consuming.queues import Queues
from jobs_lib.kafka.member import GroupMember
from tests.support.apps import make_app
from tests.support.fake_records import fake_record

OURS = ("topic", 0)


class Scene:
    """A consumer with a partition of a member; the test makes each step."""

    def __init__(self, stored: int | None) -> None:
        self.member = GroupMember(make_app("").settings, "group", ["topic"])
        self.member._on_assign(Mock(), [TopicPartition(*OURS)])
        self.consumer = Consumer.__new__(Consumer)
        queues = Queues(self.member, 1_000_000)
        self.consumer._member, self.consumer._queues = self.member, queues
        self.consumer._partitions = queues.partitions
        self.consumer._changed = queues.changed
        self.progress = Progress(OURS, 1, stored)
        queues.partitions[OURS] = self.progress
        self.member.listen(self.consumer)
        self.client = Mock()

    def obey(self) -> None:
        """Let the poll thread do what it was asked for."""
        self.member._obey(self.client)

    def receive(self, *offsets: int) -> None:
        """Let records arrive."""
        self.consumer.received([fake_record(at) for at in offsets])

    @property
    def waiting(self) -> list[int]:
        """The offsets of the records that wait."""
        return [get_offset(one) for one in self.progress.waiting]

    @property
    def sought(self) -> list[int]:
        """Where the client was sent to."""
        return [call.args[0].offset for call in self.client.seek.mock_calls]


@pytest.fixture
def scene() -> Scene:
    """A partition whose next offset is 100."""
    return Scene(100)


@pytest.mark.guarantee("W59")
@pytest.mark.parametrize("stored", [50, None])
def test_no_record_is_passed_over_if_a_partition_is_set_back_as_it_begins(
    scene, stored
):
    def set_back(_) -> None:
        # A worker has found another offset, and has not begun it there yet.
        with scene.consumer._changed:
            scene.progress.start_again(stored)
        scene.client.seek.side_effect = None

    scene.client.seek.side_effect = set_back
    scene.member.begin(OURS, 100)
    scene.obey()
    scene.receive(100, 101)
    assert not scene.waiting
    scene.member.begin(OURS, stored)
    scene.obey()
    scene.receive(*range(50, 53))
    assert scene.waiting == [50, 51, 52]


@pytest.mark.guarantee("W59")
def test_no_record_is_passed_over_if_a_partition_is_paused_as_it_begins(scene):
    scene.progress.stored = 90

    def pause(_) -> None:
        with scene.consumer._changed:
            scene.consumer._queues.pause(scene.progress)
        scene.client.seek.side_effect = None

    scene.receive(*range(90, 100))
    scene.client.seek.side_effect = pause
    scene.member.begin(OURS, 100)
    scene.obey()
    scene.receive(100, 101)
    assert not scene.waiting
    with scene.consumer._changed:
        scene.consumer._queues.refill(scene.progress)
    scene.obey()
    scene.receive(*range(90, 93))
    assert scene.waiting == [90, 91, 92]


def test_a_partition_that_was_begun_too_far_by_a_late_thread_is_set_back(scene):
    for offset in (100, 120):
        scene.member.begin(OURS, offset)
        scene.obey()
    assert not scene.progress.reading
    scene.receive(120)
    scene.obey()
    scene.receive(100)
    assert scene.sought == [100, 120, 100]
    assert scene.waiting == [100]


def test_a_partition_without_an_offset_begins_with_the_oldest_record():
    scene = Scene(None)
    scene.member.begin(OURS, None)
    scene.obey()
    assert scene.progress.reading
    scene.progress.reading = False
    scene.consumer.out_of_range(OURS, 25, 30)
    scene.obey()
    assert scene.progress.reading
    assert scene.sought == [25]


@pytest.mark.parametrize("state", ["", "busy", "doubted"])
def test_a_partition_that_comes_again_is_read_on_behind_what_waits(scene, state):
    scene.member.begin(OURS, 100)
    scene.obey()
    scene.receive(100, 101)
    scene.progress.busy, scene.progress.in_doubt = state == "busy", state == "doubted"
    scene.member._on_lost(Mock(), [TopicPartition(*OURS)])
    scene.member._on_assign(Mock(), [TopicPartition(*OURS)])
    scene.receive(0, 102)
    scene.obey()
    scene.receive(102, 103)
    assert scene.sought == [100, 102]
    assert scene.waiting == [100, 101, 102, 103]
    # Others may have moved its offset.
    assert scene.progress.in_doubt


@pytest.mark.parametrize("state", ["paused", "stopped", "replaced", "range", "leaving"])
def test_a_partition_that_comes_again_is_not_read_before_it_may_be(scene, state):
    setattr(scene.progress, state, (5, 9) if state == "range" else True)
    scene.member._on_lost(Mock(), [TopicPartition(*OURS)])
    scene.member._on_assign(Mock(), [TopicPartition(*OURS)])
    scene.obey()
    assert not scene.client.mock_calls


def test_a_partition_that_had_ended_is_asked_for_its_range_again(scene):
    # What it has asked for was forgotten with its client.
    scene.progress.ended = True
    scene.consumer.assigned(frozenset({OURS}))
    assert scene.progress.stopped
    assert not scene.member._commands
