"""A partition that is assigned again is read again, whatever it was before."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import TopicPartition

from jobs_lib.kafka.hand_reader import HandReader
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


@pytest.mark.parametrize("is_left", [False, True], ids=["moved", "left"])
def test_a_partition_that_was_paused_is_read_once_it_is_assigned_again(
    make, topic, bootstrap_servers, wait_for, is_left
):
    name = topic(1)
    produce(bootstrap_servers, name, [("k", n) for n in range(3)])
    offsets: list[int] = []
    listener: Any = Mock()
    listener.has_room.return_value = True
    listener.received = lambda some: offsets.extend(one.offset() for one in some)
    reader = HandReader(make().settings, name, lambda: 0.0)
    reader.listen(listener)
    reader.start()
    try:
        reader.assign((name, 0), 0)
        wait_for(lambda: offsets == [0, 1, 2], timeout=30, what="it is read")
        reader.pause((name, 0))
        wait_for(lambda: reader._paused, timeout=30, what="it is paused")
        if is_left:
            reader.unassign((name, 0))
        reader.assign((name, 0), 1)
        wait_for(lambda: offsets[3:] == [1, 2], timeout=15, what="it is read again")
    finally:
        reader.stop(10)
