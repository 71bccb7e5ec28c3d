"""What a member of a consumer group asks its client for, and when."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from jobs_lib.kafka import hand_reader
from jobs_lib.kafka.hand_reader import HandReader
from jobs_lib.kafka.member import GroupMember
from tests.support.apps import make_app

OURS = ("topic", 0)


@pytest.fixture
def member():
    """A member that has a partition, out of range or begun."""
    found = GroupMember(make_app("").settings, "group", ["topic"])
    found.listen(Mock())
    found._on_assign(Mock(), [TopicPartition(*OURS)])
    return found


@pytest.mark.parametrize("state", ["new", "begun", "out of range"])
def test_partitions_that_leave_are_committed_and_not_begun(member, state):
    if state == "begun":
        member._begun[OURS] = 3
    elif state == "out of range":
        member._out_of_range[OURS] = 0.0
    # In any order: several threads ask.
    member.begin(OURS, None)
    member.commit({OURS: 7})
    member.begin(OURS, 7)
    consumer = Mock()
    member._on_revoke(consumer, [TopicPartition(*OURS)])
    (commit,) = consumer.commit.mock_calls
    assert [at.offset for at in commit.kwargs["offsets"]] == [7]
    # The client would wait for ever for an answer if it is just closing.
    for call in (consumer.assign, consumer.incremental_assign, consumer.seek):
        assert not call.called
    after = Mock()
    member._obey(after)
    assert not after.mock_calls


def test_partitions_that_stay_are_begun_after_others_have_left(member):
    member._on_assign(Mock(), [TopicPartition("topic", 1)])
    member.begin(("topic", 1), 5)
    member._on_revoke(Mock(), [TopicPartition(*OURS)])
    consumer = Mock()
    member._obey(consumer)
    assert [at.args[0].offset for at in consumer.seek.mock_calls] == [5]


def test_partitions_go_on_where_they_were_when_all_are_assigned_again():
    member = GroupMember(
        make_app("", assignment_strategy="range").settings, "group", ["topic"]
    )
    member.listen(Mock())
    member._on_assign(Mock(), [TopicPartition("topic", n) for n in range(4)])
    consumer = Mock()
    # Of the partition 1 nothing was read yet, and 2 was read on from where it began.
    positions = {1: -1001, 2: 9, 3: -1001}
    consumer.position = lambda places: [
        TopicPartition(at.topic, at.partition, positions[at.partition]) for at in places
    ]
    member.begin(("topic", 1), 5)
    member.begin(("topic", 2), 5)
    member._obey(consumer)
    member._out_of_range[OURS] = 0.0
    member.begin(OURS, 7)
    member._obey(consumer)
    (assign,) = consumer.assign.mock_calls
    places = {at.partition: at.offset for at in assign.args[0]}
    assert places == {0: 7, 1: 5, 2: 9, 3: OFFSET_BEGINNING}


def make_early() -> KafkaException:
    """The client's error while the partition's fetcher has not started."""
    return KafkaException(KafkaError(KafkaError._STATE))


@pytest.mark.guarantee("W59")
def test_a_partition_is_read_from_where_it_was_begun_last_although_that_was_too_early(
    member,
):
    consumer = Mock()
    consumer.seek.side_effect = [make_early(), None, None]
    member.begin(OURS, 10)
    member.begin(OURS, 7)
    member._obey(consumer)
    member.begin(OURS, 5)
    for _ in range(3):
        member._obey(consumer)
    assert consumer.seek.mock_calls[-1].args[0].offset == 5
    assert not member._commands
    assert member._begun[OURS] == 5


def test_a_partition_that_was_begun_too_early_stays_paused_if_it_was_paused_since(
    member,
):
    consumer = Mock()
    consumer.seek.side_effect = [make_early(), None]
    member.begin(OURS, 10)
    member._obey(consumer)
    member.pause(OURS)
    for _ in range(3):
        member._obey(consumer)
    assert OURS in member._paused
    assert not consumer.resume.called
    assert not member._commands


@pytest.mark.parametrize("is_left", [False, True])
def test_a_partition_that_was_begun_too_early_stays_where_it_was_assigned_since(
    is_left,
):
    reader = HandReader(make_app("").settings, "group", lambda: 0.0)
    reader.assign(OURS, 5)
    consumer = Mock()
    reader._obey(consumer)
    consumer.seek.side_effect = [make_early(), None]
    reader.begin(OURS, 10)
    if is_left:
        reader.unassign(OURS)
    reader.assign(OURS, 7)
    for _ in range(3):
        reader._obey(consumer)
    assert reader._begun[OURS] == 7
    assert not reader._commands


def test_a_partition_at_whose_assignment_the_client_fails_is_lost(monkeypatch):
    reader = HandReader(make_app("").settings, "group", lambda: 0.0)
    reader.listen(listener := Mock())
    reader.assign(OURS, 5)
    consumer = Mock()
    consumer.incremental_assign.side_effect = make_early()
    monkeypatch.setattr(hand_reader, "make_consumer", lambda *_, **__: consumer)
    with pytest.raises(KafkaException):
        next(reader._poll())
    # Its owner assigns it again. Else nobody would ever read it.
    listener.lost.assert_called_once_with(frozenset({OURS}))


@pytest.mark.expects("loop.failed")
def test_a_broker_that_does_not_answer_is_waited_for_once_in_a_round():
    member = GroupMember(make_app("").settings, "group", ["topic"])
    member.listen(listener := Mock())
    parts = [("topic", number) for number in range(30)]
    member._on_assign(Mock(), [TopicPartition(*one) for one in parts])
    for one in parts:
        member.ask_range(one)
    asked: list[int] = []
    beats = member.pulse.beats

    def answer(at: TopicPartition, timeout: float) -> tuple[int, int]:
        asked.append(at.partition)
        if at.partition < 2:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return 0, 7

    consumer = Mock(get_watermark_offsets=answer)
    member._obey(consumer)
    assert asked == [0]
    member._obey(consumer)
    assert asked == [0, 1]
    # The others have another broker.
    member._obey(consumer)
    assert asked == [0, 1, *range(2, 30), 0]
    assert listener.out_of_range.call_count == 28
    assert member.pulse.beats > beats + 30
    member._stopping.set()
    member._obey(consumer)
    assert len(asked) == 31
