"""Write events and a group's offset in one transaction of Kafka."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException

from jobs_lib.backoff import RECONNECT
from jobs_lib.errors import JobsError, UnavailableError
from jobs_lib.kafka.client import (
    find_cause,
    flush,
    init_transactions,
    make_producer,
)
from jobs_lib.kafka.refusal import OF_RECORD, OF_TOPIC, find_refusal, is_soon_over

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from confluent_kafka import Producer, TopicPartition

    from jobs_lib.settings import Settings
    from jobs_lib.streams.event import Event

    _Hear = Callable[[KafkaError | None, object], None]

_ANY_PARTITION = -1
_NOW = 0
_REFUSALS = OF_RECORD | OF_TOPIC
_SHORTEST = 1.0
"""Seconds; librdkafka refuses shorter timeouts of transactions."""


class RefusedEventsError(JobsError):
    """Kafka refuses an event; the transaction is aborted, and the writer goes on."""


class TransactionWriter:
    """A transactional producer, which may be opened again after each error.

    Args:
        settings: where Kafka is.
        name: the transactional id: an older producer of it is refused.
        stopping: once set, nothing waits any more.
        largest: bytes that an event may have; 0 leaves that to the client.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        stopping: threading.Event,
        *,
        largest: int = 0,
    ) -> None:
        self._settings = settings
        self._stopping = stopping
        self._name = name
        self._largest = largest
        # Less than a session: what a dead member has left open is over when others get
        # its partitions.
        self._timeout = max(_SHORTEST, settings.session_timeout / 2)
        self._producer: Producer | None = None

    def open(self) -> None:
        """Take the transactional id: what an older producer has left open is aborted.

        Raises:
            AccessError: Kafka denies the right to the id.
            KafkaException: no broker answers.
        """
        producer = self._make()
        until = time.monotonic() + self._timeout
        while (error := init_transactions(producer, self._timeout)) is not None:
            denied = find_refusal(error, self._settings, self._name, "WRITE")
            if denied is not None:
                raise denied
            is_late = time.monotonic() > until or self._stopping.is_set()
            if is_late or not is_soon_over(error):
                raise KafkaException(error)
            if not error.retriable():
                producer = self._make()
            self._stopping.wait(RECONNECT.delay(1))
        self._producer = producer

    def _make(self) -> Producer:
        return make_producer(
            self._settings, self._name, self._timeout, largest=self._largest
        )

    def close(self) -> None:
        """Abort what is open, and close the producer."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        with suppress(KafkaException):
            producer.abort_transaction(self._timeout)
        # Destroyed earlier, librdkafka 2.16 may free memory twice.
        producer.purge(in_flight=False, blocking=False)
        flush(producer, self._timeout)

    def write(
        self, events: Sequence[Event], place: TopicPartition, metadata: Any
    ) -> None:
        """Commit events and the offset behind their record: both, or neither.

        Args:
            events: to send.
            place: the group's next offset of a partition.
            metadata: of the member that has the partition: if it has lost it, the
                offset is refused.

        Raises:
            KafkaException: the writer must be opened again; Kafka may have committed.
            RefusedEventsError: Kafka refuses an event; nothing was committed.
        """
        assert self._producer is not None
        producer, error = self._producer, None
        refusals: list[KafkaError] = []

        def hear(refusal: KafkaError | None, _: object) -> None:
            if refusal is not None and refusal.code() in _REFUSALS:
                refusals.append(refusal)

        try:
            producer.begin_transaction()
            for event in events:
                _produce(producer, event, hear)
            self.finish(producer, place, metadata)
        except KafkaException as failure:
            error = failure.args[0]
        # Outside the except block: an error that the client raises inside it keeps the
        # first one in memory, and the producer with it.
        if error is None:
            return
        error = find_cause(producer, error)
        if error.code() == KafkaError._INCONSISTENT:
            # The commit has failed, and only the events' own answers say why.
            producer.poll(0)
            error = refusals[0] if refusals else error
        if error.fatal() or error.code() not in _REFUSALS:
            raise KafkaException(error)
        # The broker has seen sequence numbers that it does not count: the same producer
        # would go on behind them, and be refused for that.
        self.close()
        self.open()
        topics = ", ".join(sorted({repr(event.topic) for event in events}))
        raise RefusedEventsError(
            f"Kafka refuses an event for {topics}: {error.name()}. Does the topic "
            "exist, may this client write to it, and is the event within its "
            "`max.message.bytes`?"
        )

    def finish(self, producer: Producer, place: TopicPartition, metadata: Any) -> None:
        """Send the offset, and commit.

        Raises:
            KafkaException: it failed.
        """
        producer.send_offsets_to_transaction([place], metadata, self._timeout)
        producer.commit_transaction(self._timeout)


def _produce(producer: Producer, event: Event, hear: _Hear) -> None:
    put = event.topic, event.value, event.key, _ANY_PARTITION, hear, None, _NOW
    while True:
        is_empty = not len(producer)
        try:
            producer.produce(*put, event.headers)
        except BufferError:
            if is_empty:
                raise UnavailableError(
                    f"an event of {event.topic!r} is larger than the client's queue: "
                    "raise `queue.buffering.max.kbytes` in JOBS_LIB_KAFKA"
                ) from None
            producer.poll(0.05)
        else:
            return
