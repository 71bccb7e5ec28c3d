"""Other producers' transactions, in the log and in topics that are consumed."""

from __future__ import annotations

from contextlib import suppress

import pytest
from confluent_kafka import KafkaException

from jobs_lib.coordination import snapshots
from jobs_lib.coordination.messages import (
    ClaimingPartition,
    Heartbeat,
    Probe,
    ReleasingPartition,
    Shared,
)
from jobs_lib.coordination.verification import Result, verify
from jobs_lib.kafka.places import find_places
from tests.coordination.commands import GROUP, WAIT
from tests.support.transactions import open_transaction

ORDERS = Shared(GROUP, "orders", 0)
BOTH = pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])


@pytest.fixture
def often(monkeypatch):
    """Snapshots come often, and are used even in a short log."""
    monkeypatch.setattr(snapshots, "EVERY", 20)
    monkeypatch.setattr(snapshots, "_WINDOW", 30)


@pytest.fixture
def begin(bootstrap_servers):
    """A function that begins a transaction in a topic: what is open ends at last."""
    begun = []

    def start(topic: str, partitions: int = 1):
        begun.append(open_transaction(bootstrap_servers, topic, partitions))
        return begun[-1]

    yield start
    for producer in begun:
        with suppress(KafkaException):  # It has ended already.
            producer.abort_transaction(WAIT)


def fill(log, count: int = 45) -> None:
    """Set a position, and write so many records until there are snapshots."""
    log.send(ClaimingPartition(log.sender, ORDERS, 500)).wait(WAIT)
    log.send(Heartbeat(log.sender, ORDERS, 0, 7)).wait(WAIT)
    for _ in range(count - 2):
        log.send(Probe(log.sender), place=0).wait(WAIT)
    log.read_to_end()


@pytest.mark.usefixtures("often")
def test_an_open_transaction_in_the_log_keeps_nobody_from_starting(
    log_topic, open_log, begin
):
    name = log_topic(1)
    first = open_log(name, "a")
    begin(name)
    fill(first)
    second = open_log(name, "b")
    assert second._places[0].is_restored
    assert second.find(ORDERS) == first.find(ORDERS)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("end", ["abort_transaction", None])
def test_a_log_is_verified_with_what_a_transaction_has_not_committed(
    log_topic, open_log, begin, settings, end
):
    name = log_topic(1)
    begun = begin(name)
    log = open_log(name)
    fill(log)
    log.stop()  # Its last snapshot is in the log: it comes before the end then.
    if end is not None:
        getattr(begun, end)(WAIT)
    (found,) = verify(settings, name)
    assert (found.result, found.records) == (Result.SAME, (found.as_of or 0) + 1)


def test_a_log_that_ends_with_the_end_of_a_transaction_is_read_to_its_end(
    log_topic, open_log, begin, settings, wait_for
):
    name = log_topic(1)
    first = open_log(name, "a")
    first.send(ClaimingPartition(first.sender, ORDERS, 500)).wait(WAIT)
    first.send(ReleasingPartition(first.sender, ORDERS, 0, 7)).wait(WAIT)
    first.stop()
    begin(name).commit_transaction(WAIT)
    # The broker may write the end a moment later.
    wait_for(lambda: find_places(settings, name, "end") == {0: 4})
    second = open_log(name, "b", interval=0.1)
    second.read_to_end(WAIT)
    assert second.lost_places == {0}
    # One that reads is told at once, and so is one that knows the log.
    end = find_places(settings, name, "end")[0] + 2
    begin(name).abort_transaction(WAIT)
    wait_for(lambda: find_places(settings, name, "end")[0] >= end)
    second.read_to_end(WAIT)


@pytest.mark.expects("loop.failed")  # a busy broker says late where it ends
@BOTH
def test_a_new_group_that_begins_at_the_end_gets_what_is_committed_later(
    log_topic, topic, publish, consume, begin, wait_for, delivery
):
    log, data = log_topic(1), topic(1)
    publish(data, 3)
    begun = begin(data)
    publish(data, 1)
    consumer, handler = consume(log, data, start="latest", delivery=delivery)
    shared = Shared(GROUP, data, 0)
    wait_for(lambda: consumer.member.log.find(shared).position is not None)
    begun.commit_transaction(WAIT)
    wait_for(
        lambda: handler.seen == [(0, 3), (0, 4)],
        what=lambda: f"both are handled: {handler.seen}",
    )
