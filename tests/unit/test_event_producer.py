"""What a publish says of an event that got no place."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError

from jobs_lib.errors import AccessError, UnknownPublishError
from jobs_lib.settings import Settings
from jobs_lib.streams import publisher as module
from jobs_lib.streams.event import Event, Place
from jobs_lib.streams.publisher import ANY_PARTITION, EventProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib.streams.outcome import Outcome

REFUSAL = AccessError("Kafka does not let the user 'alice' in")


class Client:
    """Kafka's producer, whose answers the test gives."""

    def __init__(self) -> None:
        self.refuse: Callable[[AccessError], object] = lambda _: None
        self._hears: list[Callable[..., None]] = []
        self._answers: list[tuple[Any, Any]] = []

    def produce(self, *arguments: Any) -> None:
        """Take an event."""
        self._hears.append(arguments[4])

    def poll(self, seconds: float) -> None:
        """Give the answers."""
        while self._answers:
            self._hears.pop(0)(*self._answers.pop(0))

    def flush(self, seconds: float) -> None:
        """See poll."""

    def list_topics(self, topic: str, timeout: float) -> None:
        """Answer as one that is let in."""

    def __len__(self) -> int:
        return len(self._hears)

    def answer(self, partition: int, offset: int | None = None) -> None:
        """Say where the next event is; without an offset its time is over."""
        error = KafkaError(KafkaError._MSG_TIMED_OUT) if offset is None else None
        place = Mock(partition=lambda: partition, offset=lambda: offset)
        self._answers.append((error, place))


@pytest.fixture
def client(monkeypatch) -> Client:
    """The client of the producer."""
    client = Client()

    def make(settings: Any, acks: str, seconds: float, refuse: Any, **_: Any) -> Client:
        client.refuse = refuse
        return client

    monkeypatch.setattr(module, "make_publisher", make)
    return client


@pytest.fixture
def producer(client) -> Iterator[EventProducer]:
    """A producer of that client."""
    made = EventProducer(Settings(kafka_bootstrap_servers="there:1"), "all", 0)
    yield made
    made.close()


def send(producer: EventProducer, partition: int = ANY_PARTITION) -> Outcome:
    """Send an event."""
    return producer.send(Event("orders", "k", b"1", 1, []), partition)


@pytest.mark.parametrize("partition", [ANY_PARTITION, 3])
def test_an_event_of_a_client_that_was_never_let_in_is_not_in_the_topic(
    producer, client, partition
):
    outcome = send(producer, partition)
    client.refuse(REFUSAL)
    client.answer(partition)
    with pytest.raises(AccessError, match="does not let the user 'alice' in"):
        outcome.wait()


@pytest.mark.guarantee("T5")
@pytest.mark.parametrize("was_let_in", ["by an event", "by a question", "before"])
def test_an_event_that_may_be_stored_is_unknown_although_a_login_is_refused(
    producer, client, was_let_in
):
    if was_let_in == "by an event":
        first = send(producer)
        client.answer(0, offset=7)
        assert first.wait() == Place(0, 7)
    elif was_let_in == "by a question":
        producer.learn("orders", 1)
    outcome = send(producer)
    client.refuse(REFUSAL)
    # It has a partition: so the client knew the topic, and may have sent it.
    client.answer(0 if was_let_in == "before" else ANY_PARTITION)
    with pytest.raises(UnknownPublishError, match=r"'alice' in.*Nobody knows") as told:
        outcome.wait()
    assert "the same request id" in str(told.value)


@pytest.mark.guarantee("T5")
def test_an_event_that_comes_as_its_producer_is_closed_gets_its_place(producer, client):
    # A thread has found the producer, and another one closes the app.
    producer.close()
    outcome = send(producer)
    client.answer(0, offset=7)
    wait_for_end(outcome)
    assert outcome.wait() == Place(0, 7)


def wait_for_end(outcome: Outcome) -> None:
    """Wait until it is known, but not for ever."""
    waiting = threading.Thread(target=outcome.wait, daemon=True)
    waiting.start()
    waiting.join(5)
    assert not waiting.is_alive()
