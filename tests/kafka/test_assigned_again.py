"""A partition that is lost and assigned again before its owner has looked."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka import TopicPartition

from jobs_lib.ownership import Ownership
from tests.support.apps import running
from tests.support.records import produce


@pytest.fixture
def hold(monkeypatch):
    """A function that holds all ownerships before their next look; returns the end."""
    may_look, waits = threading.Event(), threading.Event()
    may_look.set()
    look = Ownership._reconcile

    def wait_and_look(self, connection) -> None:
        if not may_look.is_set():
            waits.set()
            assert may_look.wait(60)
        look(self, connection)

    monkeypatch.setattr(Ownership, "_reconcile", wait_and_look)

    def begin() -> threading.Event:
        may_look.clear()
        assert waits.wait(30)
        return may_look

    yield begin
    may_look.set()


@pytest.mark.guarantee("W59")
def test_a_partition_goes_on_that_comes_again_before_its_loss_was_noticed(
    make, topic, bootstrap_servers, seen, read_seen, wait_for, hold
):
    name = topic(1)
    app = make(heartbeat_interval=0.2)

    @app.consumer(name, group=f"{name}-g")
    def handle(record, connection) -> None:
        connection.execute(seen, (record.partition, record.value))

    with running(app, "consumers") as service:
        produce(bootstrap_servers, name, [("k", n) for n in range(3)])
        wait_for(lambda: read_seen() == [0, 1, 2], timeout=60, what="all were handled")
        may_look = hold()
        (owner,) = service._owners
        member = owner.member
        assert member is not None
        again = threading.Event()

        def rebalance(consumer) -> bool:
            # As Kafka does it where a session has just ended.
            member._on_lost(consumer, [TopicPartition(name, 0)])
            member._on_assign(consumer, [TopicPartition(name, 0)])
            again.set()
            return True

        member._commands.append(rebalance)
        assert again.wait(30)
        may_look.set()
        produce(bootstrap_servers, name, [("k", n) for n in range(3, 6)])
        wait_for(lambda: read_seen() == [*range(6)], timeout=15, what="it goes on")
