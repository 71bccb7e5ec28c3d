"""The producers of an app's streams: one for each kind of acknowledgement.

Many callers share a producer, and its thread gives each of them the place of its event
when Kafka has acknowledged it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from jobs_lib.errors import PayloadError, UnavailableError, UnknownPublishError
from jobs_lib.kafka.client import find_broker, make_publisher
from jobs_lib.kafka.refusal import (
    OF_RECORD,
    OF_TOPIC,
    explain,
    find_refusal,
    missing_topics,
)
from jobs_lib.loop import Loop
from jobs_lib.streams.event import Place
from jobs_lib.streams.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka import Message

    from jobs_lib.errors import AccessError
    from jobs_lib.settings import Settings
    from jobs_lib.streams.event import Event
    from jobs_lib.streams.permits import Permits
    from jobs_lib.streams.steps import Steps

ANY_PARTITION = -1
"""The partitioner chooses."""
_NOW = 0
_POLL_SECONDS = 0.1


class Publisher:
    """Sends events, and makes the producers that it needs.

    Args:
        settings: where Kafka is.
        largest: bytes that the largest event of any stream may have.
        permits: knows which streams may be published to.
    """

    def __init__(self, settings: Settings, largest: int, permits: Permits) -> None:
        self._settings = settings
        self._largest = largest
        self._permits = permits
        self._lock = threading.Lock()
        self._producers: dict[tuple[int, str], EventProducer] = {}
        """By process and acks: a fork does not use its parent's."""

    def is_ready(self, topic: str, acks: str) -> bool:
        """Whether :meth:`prepare` would return at once; it costs less to ask this."""
        period = self._permits.find(topic)
        producer = self._producers.get((os.getpid(), acks))
        if period is None or producer is None:
            return False
        return producer.known.get(topic) == period

    def prepare(self, topic: str, acks: str) -> Steps[int]:
        """Wait until an event may be sent, by a client that knows all partitions.

        Send it at once afterwards. Returns the period (see ``permits``).

        Raises:
            GrowingError: the topic gets more partitions, for a long time.
            UnavailableError: nobody knows whether it may be sent, or how many
                partitions the topic has.
        """
        while True:
            period = self._permits.find(topic)
            if period is None:
                period = yield from self._permits.wait(topic)
            producer = self._find(acks)
            if producer.knows(topic, period):
                return period
            # This takes a while, and the permit may be over then.
            yield partial(producer.learn, topic, period)

    def send(self, event: Event, acks: str, partition: int = ANY_PARTITION) -> Outcome:
        """Send an event; the outcome is its place, or the error.

        Raises:
            ConfigurationError: a setting of Kafka's client is unknown or unsafe.
            PayloadError: the event is too large; it was not sent.
            UnavailableError: too many events wait already; it was not sent.
        """
        producer = self._find(acks)
        try:
            return producer.send(event, partition)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._FATAL:
                raise producer.explain(event, error.args[0]) from None
        # It sends nothing any more: such as after Kafka has lost records of it.
        self._drop(acks, producer)
        return self._find(acks).send(event, partition)

    def close(self) -> None:
        """Wait for what is under way, and close the producers of this process."""
        with self._lock:
            kept = self._producers
            self._producers = {}
        for (pid, _), producer in kept.items():
            if pid == os.getpid():
                producer.close()

    def _find(self, acks: str) -> EventProducer:
        place = os.getpid(), acks
        found = self._producers.get(place)
        if found is None:
            with self._lock:
                found = self._producers.get(place)
                if found is None:
                    found = EventProducer(self._settings, acks, self._largest)
                    self._producers[place] = found
        return found

    def _drop(self, acks: str, producer: EventProducer) -> None:
        with self._lock:
            if self._producers.get((os.getpid(), acks)) is producer:
                del self._producers[os.getpid(), acks]
        producer.retire()


class EventProducer:
    """One producer, with a thread that hears what became of each event."""

    def __init__(self, settings: Settings, acks: str, largest: int) -> None:
        self._settings = settings
        self._seconds = settings.publish_timeout
        self._refusals: deque[AccessError] = deque(maxlen=1)
        self._let_in = False
        """Whether a broker has ever let the client in, and so may have got events."""
        self._fatal: KafkaError | None = None
        """Why the client sends nothing any more."""
        self._heard: deque[tuple[Outcome, Place | Exception]] = deque()
        """What became of events whose callers do not know yet."""
        self._producer = make_publisher(
            settings, acks, self._seconds, self._refusals.append, largest=largest
        )
        self.known: dict[str, int] = {}
        """By topic, the period in which the client has heard of its partitions."""
        self._loop = Loop(f"publisher acks={acks}", self._poll)
        self._loop.start()

    def knows(self, topic: str, period: int) -> bool:
        """Whether the client knows how many partitions a topic has in a period."""
        # Of another topic it knows nothing yet, and asks by itself.
        return self.known.setdefault(topic, period) == period

    def learn(self, topic: str, period: int) -> None:
        """Let the client hear how many partitions a topic has.

        By itself it asks every five minutes. Until then it would send keys to the
        partitions that they had before.

        Raises:
            AccessError: the brokers do not let it in, or deny the right to it.
            UnavailableError: no broker answers.
        """
        try:
            self._producer.list_topics(topic, timeout=self._seconds)
        except KafkaException as error:
            if self._refusals:
                raise self._refusals[-1] from None
            raise explain(error.args[0], self._settings, topic, "DESCRIBE") from None
        self._let_in = True
        self.known[topic] = period

    def send(self, event: Event, partition: int) -> Outcome:
        """Send an event.

        Raises:
            KafkaException: the client refuses it.
            UnavailableError: the client's queue is full.
        """
        outcome = Outcome()
        heard = partial(self._hear, outcome, event, partition)
        try:
            # Positional arguments: keywords would take a quarter of the call.
            self._producer.produce(
                event.topic,
                event.value,
                event.key,
                partition,
                heard,
                None,
                _NOW,
                event.headers,
            )
        except BufferError:
            raise UnavailableError(
                f"an event of {event.topic!r} was not sent: {len(self._producer):,} "
                "events wait for Kafka already. Try again later"
            ) from None
        if self._loop.stopping.is_set():
            # Its thread may have ended just before, and nobody would hear of the event.
            threading.Thread(
                target=self._poll_to_end, name="jobs_lib last event", daemon=True
            ).start()
        return outcome

    def explain(
        self, event: Event, error: KafkaError, *, may_be_sent: bool = False
    ) -> Exception:
        """Say what became of an event that got an error instead of a place.

        Args:
            event: the event.
            error: Kafka's or librdkafka's error.
            may_be_sent: whether a broker may have the event.
        """
        if error.code() == KafkaError._PURGE_QUEUE and self._fatal is not None:
            error = self._fatal
        if error.code() in OF_RECORD:
            return PayloadError(
                f"Kafka refuses an event of {event.topic!r}: {error.name()}. Key and "
                f"value have {_size(event):,} bytes; the topic's `max.message.bytes` "
                "in Kafka says how many it takes"
            )
        right = "WRITE"
        if error.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            # A broker asks so before an idempotent producer sends anything.
            right = f"WRITE on the topic {event.topic!r}, or IDEMPOTENT_WRITE"
        refusal = find_refusal(error, self._settings, event.topic, right)
        if refusal is not None:
            return refusal
        if error.code() in OF_TOPIC:
            return missing_topics(self._settings, [event.topic])
        reason = error.str()
        if self._refusals:
            if not may_be_sent:
                return self._refusals[-1]
            # A broker may have stored the event before it refused the next login.
            reason = str(self._refusals[-1])
        unknown = UnknownPublishError(
            f"Kafka at {self._settings.kafka_bootstrap_servers} has not acknowledged "
            f"an event of {event.topic!r} within {self._seconds:g} s (JOBS_LIB_"
            f"PUBLISH_TIMEOUT): {reason}. Nobody knows whether it is in the topic. "
            "Publish it again with the same request id, which finds out"
        )
        unknown.subject = "Kafka"
        return unknown

    def retire(self) -> None:
        """Send nothing more; the thread ends when all events have their results."""
        self._loop.stopping.set()

    def close(self) -> None:
        """Wait until each event has its result, and end the thread."""
        try:
            self._producer.flush(self._seconds)
        except KafkaException as error:
            # As in a poll. The thread hears what becomes of the events.
            self._fatal = error.args[0]
        self._loop.stop()

    def _poll(self) -> Iterator[None]:
        # In this thread: callers may be unable to wait.
        find_broker(self._producer, self._seconds)
        while not self._loop.stopping.is_set() or len(self._producer):
            try:
                self._producer.poll(_POLL_SECONDS)
            except KafkaException as error:
                # It sends nothing more. Its events get their results at later polls.
                self._fatal = error.args[0]
            self._tell()
            yield
        # What the last flush has heard.
        self._tell()

    def _poll_to_end(self) -> None:
        for _ in self._poll():
            pass

    def _hear(
        self,
        outcome: Outcome,
        event: Event,
        asked: int,
        error: KafkaError | None,
        message: Message,
    ) -> None:
        if error is not None:
            # Only who was let in knows the partitions among which it chooses.
            has_chosen = asked < 0 <= _read_partition(message)
            may_be_sent = self._let_in or has_chosen
            explained = self.explain(event, error, may_be_sent=may_be_sent)
            self._heard.append((outcome, explained))
            return
        self._let_in = True
        self._refusals.clear()
        offset = message.offset()
        known = None if offset is None or offset < 0 else offset
        self._heard.append((outcome, Place(message.partition() or 0, known)))

    def _tell(self) -> None:
        """Wake the callers of all events that a poll has heard of, and not before.

        A caller that is awake while the others are still to be heard of would take
        turns with this thread, and its next event would leave alone.
        """
        while self._heard:
            try:
                outcome, result = self._heard.popleft()
            except IndexError:
                return  # another thread tells them, too, at the end
            outcome.settle(result)


def _read_partition(message: Message) -> int:
    partition = message.partition()
    return ANY_PARTITION if partition is None else partition


def _size(event: Event) -> int:
    return len(event.key.encode()) + len(event.value or b"")
