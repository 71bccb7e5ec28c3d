"""What a member of a consumer group asks its client for, and when."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from confluent_kafka import OFFSET_BEGINNING, TopicPartition

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
