"""A consumer's member that shares over a log ends with its holder, whatever fails."""

from __future__ import annotations

from collections import deque
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException

from jobs_lib.coordination import held_member
from jobs_lib.coordination.held_member import HeldMember
from jobs_lib.coordination.messages import Shared
from jobs_lib.errors import ConfigurationError
from jobs_lib.settings import load_settings

ORDERS = Shared("shop.consume", "orders", 0)


class FakeHolder:
    """Stands for the member of the log; it only notes what it is asked for."""

    def __init__(self, *_: object, **__: object) -> None:
        self.error = None
        self.asked: list[object] = []
        HOLDERS.append(self)

    def start(self) -> None:
        self.asked.append("start")

    def ask_to_stop(self) -> None:
        self.asked.append("ask")

    def list_held(self) -> list[Shared]:
        return [ORDERS]

    def release(self, shared: Shared) -> None:
        self.asked.append(shared)

    def stop(self, timeout: float) -> None:
        self.asked.append("stop")


HOLDERS: list[FakeHolder] = []


class FakeConsumer:
    """A client of Kafka that cannot let a partition go."""

    is_closed = False

    def __getattr__(self, name: str) -> object:
        return lambda *_: None

    def incremental_unassign(self, places: object) -> None:
        raise KafkaException(KafkaError(KafkaError._STATE, "it is broken"))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def member(monkeypatch):
    """A member whose holder and whose client are no real ones."""
    HOLDERS.clear()
    monkeypatch.setattr(held_member, "Member", FakeHolder)
    monkeypatch.setattr(held_member, "make_consumer", lambda *_, **__: FakeConsumer())
    return HeldMember(
        load_settings(), "mailer", ["orders"], log_group="shop.consume", client_id="a"
    )


def test_no_holder_begins_while_nobody_can_read_what_it_holds(member, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise ConfigurationError("there is no thread for another client")

    monkeypatch.setattr(held_member, "make_consumer", refuse)
    with pytest.raises(ConfigurationError, match="no thread"):
        next(member._be_member())
    # One that went on to live would have the next one end for good.
    assert [one.asked for one in HOLDERS if "start" in one.asked] == []


def test_a_holder_ends_also_if_the_client_fails_to_let_go(member, monkeypatch):
    consumer = FakeConsumer()
    monkeypatch.setattr(held_member, "make_consumer", lambda *_, **__: consumer)
    work = member._be_member()
    member._poll_once = lambda _: None
    next(work)
    member._assigned.add(("orders", 0))
    member._stopping.set()
    with pytest.raises(KafkaException, match="broken"):
        next(work)
    assert HOLDERS[0].asked == ["start", "ask", ORDERS, "stop"]
    assert consumer.is_closed
    assert not member._assigned


def test_a_member_that_is_stopped_as_it_begins_starts_no_holder(member, monkeypatch):
    class LateHolder(FakeHolder):
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__()
            # It was not there yet for whoever stops the member.
            member.stop(0)

    monkeypatch.setattr(held_member, "Member", LateHolder)
    assert list(member._be_member()) == []
    assert HOLDERS[0].asked == []


def test_a_partition_that_is_to_be_left_as_the_member_ends_is_released(member):
    class Leaving(deque[object]):
        def append(self, one: object) -> None:
            # The poll thread has read the list before.
            member._is_ending = True
            super().append(one)

    member._holder = FakeHolder()
    member._leaving = Leaving()
    member.leave(ORDERS)
    assert HOLDERS[0].asked == [ORDERS]


@pytest.mark.parametrize("again", [True, False])
def test_a_partition_is_left_as_often_as_it_is_taken_although_nobody_polls(
    member, again
):
    client = Mock()
    member._holder = FakeHolder()
    member.taken(ORDERS, None)
    member._obey(client)
    # All of it while the poll thread waits for the hand-over of another one.
    member.leave(ORDERS)
    member.lost(ORDERS)
    member.taken(ORDERS, None)
    if again:
        member.leave(ORDERS)
    member._obey(client)
    assert member._assigned == (set() if again else {("orders", 0)})
