"""What a member of a consumer group asks its client for, and when."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from confluent_kafka import TopicPartition

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
        member._begun.add(OURS)
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
