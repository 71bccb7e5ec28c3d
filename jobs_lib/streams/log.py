"""What a publish reads of a stream's topic: where it ends, and an event in it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from confluent_kafka import Consumer, KafkaException, TopicPartition

from jobs_lib.errors import (
    OffsetError,
    RecordError,
    UnknownPublishError,
)
from jobs_lib.kafka.client import (
    make_admin,
    make_consumer,
    poll_events,
    read_topic_ids,
)
from jobs_lib.kafka.headers import list_headers
from jobs_lib.kafka.patience import ask_again
from jobs_lib.kafka.places import find_records, read_ends
from jobs_lib.kafka.reader import PartsReader, Span
from jobs_lib.kafka.refusal import explain, missing_topics
from jobs_lib.partitioner import choose_partition

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from uuid import UUID

    from confluent_kafka import KafkaError, Message
    from confluent_kafka.admin import AdminClient

    from jobs_lib.errors import AccessError
    from jobs_lib.settings import Settings
    from jobs_lib.streams.event import Event

T = TypeVar("T")
REQUEST_HEADER = "ce_request"
"""The header that holds the id of a request."""
_GROUP = "jobs_lib-streams"
"""Names the clients; no group of this name is joined."""
_FRESH_SECONDS = 10.0
"""How long a known end is good enough to begin a search at."""
_CLOCKS_SECONDS = 60.0
"""So far the clocks of senders may be behind that of the database."""
_PART = 0.5
"""Of the time of a part of a search: how long it reads. The rest may pass while it
waits for what an open transaction hides."""
_MOST_LOOKED_AT = 10_000
"""Offsets. A look at more of them for a record would take a publish too long."""
_LEAST_SECONDS = 1.0
"""A part has so long even where publishes have less: its client connects first."""


class Search(NamedTuple):
    """How far the search for an event has come."""

    offset: int | None
    """Of the event; None as long as it is not found."""
    reached: int
    """Up to here it was searched."""
    is_over: bool
    """Whether it was found, or is not in the partition."""


class Log:
    """Asks Kafka about the topics of streams, by a client that joins no group.

    Args:
        settings: where Kafka is.
        find_period: finds the period (see ``permits``): what was known of partitions in
            another one counts no more.
    """

    def __init__(self, settings: Settings, find_period: Callable[[], int]) -> None:
        self._settings = settings
        self._find_period = find_period
        self._seconds = settings.publish_timeout
        self._lock = threading.Lock()
        self._refusals: deque[AccessError] = deque(maxlen=1)
        self._client: tuple[int, Consumer] | None = None
        self._admin: tuple[int, AdminClient] | None = None
        self._counts: dict[str, tuple[int, float, int]] = {}
        """By topic: in which period and when Kafka was asked, and how many partitions
        it had."""
        self._ends: dict[tuple[str, int], tuple[float, int]] = {}
        """By partition: when Kafka was asked, and its end."""

    def close(self) -> None:
        """Close the client; the next question opens another one."""
        with self._lock:
            found, self._client = self._client, None
            self._admin = None
        if found is not None and found[0] == os.getpid():
            found[1].close()

    def choose_partition(self, event: Event) -> int:
        """Choose the partition of an event's key, as the producers do."""
        period = self._find_period()
        asked_in, at, count = self._counts.get(event.topic, (-1, 0.0, 0))
        if asked_in != period or time.monotonic() > at + _FRESH_SECONDS:
            at, count = time.monotonic(), self._count_partitions(event.topic)
            self._counts[event.topic] = period, at, count
        return choose_partition(event.key, count)

    def note_end(self, topic: str, partition: int) -> int:
        """Find an offset that the next record of a partition has, or a smaller one.

        A search from there finds all that is sent from now on. An end of some seconds
        ago costs it little, and saves most publishes a question.

        Raises:
            AccessError: the brokers do not let it in, or deny the right to read.
            TopicError: the topic does not exist, or is not visible.
            UnavailableError: no broker answers.
        """
        at, end = self._ends.get((topic, partition), (0.0, -1))
        if end < 0 or time.monotonic() > at + _FRESH_SECONDS:
            at = time.monotonic()
            _, end = self.read_range(topic, partition)
            self._ends[topic, partition] = at, end
        return end

    def read_range(self, topic: str, partition: int) -> tuple[int, int]:
        """Ask for the oldest offset of a partition, and for its end.

        All that Kafka has acknowledged lies before the end. A transaction may be open
        there, which hides what follows its first record from consumers.

        Raises:
            AccessError: the brokers do not let it in, or deny the right to read.
            TopicError: the topic does not exist, or is not visible.
            UnavailableError: no broker answers.
        """
        place = TopicPartition(topic, partition)
        return self._ask(
            topic,
            lambda client: client.get_watermark_offsets(place, timeout=self._seconds),
        )

    def may_go_on(self, topic: str, partition: int, span: Span) -> bool:
        """Whether consumers may get a record of a part of a partition.

        They get none where it has only markers of transactions, or events of those that
        were aborted. It takes a client of its own to know that.

        Raises:
            AccessError: the brokers do not let it in, or deny the right to read.
            TopicError: the topic does not exist, or is not visible.
            UnavailableError: no broker answers.
        """
        if span.end - (span.start or 0) > _MOST_LOOKED_AT:
            return True
        # What a transaction hides that is open would be waited for.
        one = f"{topic}/{partition}"
        ends = read_ends(self._settings, [one], self._seconds, committed=True)
        if ends.get(one, 0) < span.end:
            return True
        return bool(find_records(self._settings, _GROUP, topic, {partition: span}))

    def read_id(self, topic: str) -> UUID | None:
        """Ask for the id of a topic: one that was made anew has another id.

        Returns None if it is not visible, or if the broker knows no ids.

        Raises:
            UnavailableError: no broker answers.
        """
        with self._lock:
            if self._admin is None or self._admin[0] != os.getpid():
                self._admin = os.getpid(), make_admin(self._settings)
            client = self._admin[1]
        poll_events(client)
        return read_topic_ids(self._settings, [topic], self._seconds, client).get(topic)

    def find_start(
        self, topic: str, partition: int, noted: int, since: datetime
    ) -> int:
        """Find where the search for the event of a request begins.

        Args:
            topic: by its name in Kafka.
            partition: may have the event.
            noted: the end of the partition, before the event was sent.
            since: when it was noted.

        Returns that end, or an earlier offset: the topic may have been made anew since,
        or shortly before, and have grown past an end of the former one. Its event is no
        older than its request all the same.

        Raises:
            AccessError: the brokers do not let it in, or deny the right to read.
            TopicError: the topic does not exist, or is not visible.
            UnavailableError: no broker answers.
        """
        oldest = max(0, round((since.timestamp() - _CLOCKS_SECONDS) * 1000))
        place = TopicPartition(topic, partition, oldest)

        def find(client: Consumer) -> int:
            (found,) = client.offsets_for_times([place], timeout=self._seconds)
            if found.error is not None:
                raise KafkaException(found.error)
            return found.offset

        # Negative if no record is as new as that.
        first = self._ask(topic, find)
        return min(first, noted) if first >= 0 else noted

    def find_request(
        self, event: Event, partition: int, start: int, request: str
    ) -> Search:
        """Find the event of a request: read from ``start`` to the end that is now.

        It returns before a sender's time is over: if the search is not, call it again
        with what was reached. It waits that long for a transaction that hides events.

        Raises:
            UnavailableError: no broker answers, or refuses.
            UnknownPublishError: records behind ``start`` are gone, or do not come.
        """
        topic = event.topic
        oldest, end = self.read_range(topic, partition)
        if start > end:
            # The topic was made anew, and is shorter.
            start = oldest
        if start < oldest:
            raise UnknownPublishError(
                f"nobody knows whether the request {request!r} was sent: it would be "
                f"in {topic}/{partition} behind offset {start}, and the records before "
                f"{oldest} are gone. Look at the entity, and use another id"
            )
        try:
            return self._find(topic, partition, Span(start, end), request.encode())
        except (OffsetError, KafkaException) as error:
            raise UnknownPublishError(
                f"nobody knows yet whether the request {request!r} was sent: {error}. "
                "Call again later with the same id; `kafka-transactions.sh "
                "find-hanging` shows a transaction that does not end"
            ) from None

    def _find(self, topic: str, partition: int, span: Span, sought: bytes) -> Search:
        seconds = max(self._seconds, _LEAST_SECONDS)
        ends_at = time.monotonic() + seconds
        spans = {(topic, partition): span}
        with PartsReader(self._settings, spans, _GROUP, patience=seconds) as reader:
            for _, messages in reader:
                for message in messages:
                    if read_request(message) == sought:
                        offset = message.offset() or 0
                        return Search(offset, offset, is_over=True)
                left = ends_at - time.monotonic()
                if left < (1 - _PART) * seconds:
                    reached = (messages[-1].offset() or 0) + 1
                    return Search(None, reached, is_over=False)
                reader.patience = left
        return Search(None, span.end, is_over=True)

    def _count_partitions(self, topic: str) -> int:
        known = self._ask(
            topic, lambda client: client.list_topics(topic, timeout=self._seconds)
        )
        found = known.topics.get(topic)
        if found is None or found.error is not None or not found.partitions:
            raise missing_topics(self._settings, [topic])
        return len(found.partitions)

    def _ask(self, topic: str, question: Callable[[Consumer], T]) -> T:
        """Ask Kafka, and ask again while a broker or a leader is only coming."""
        client = self._find_client()
        return ask_again(
            self._settings,
            lambda: question(client),
            lambda error: self._explain(client, error, topic),
            self._seconds,
        )

    def _explain(self, client: Consumer, error: KafkaError, topic: str) -> Exception:
        # Only a poll hears why the brokers do not let it in.
        client.poll(0)
        if self._refusals:
            return self._refusals.pop()
        return explain(error, self._settings, topic, "READ")

    def _find_client(self) -> Consumer:
        """The client of this process: a fork does not use its parent's."""
        with self._lock:
            if self._client is None or self._client[0] != os.getpid():
                # Events behind an open transaction lie before the end, too.
                client = make_consumer(
                    self._settings,
                    _GROUP,
                    self._refusals.append,
                    sees_uncommitted=True,
                )
                self._client = os.getpid(), client
            return self._client[1]


def read_request(message: Message) -> object:
    """Read the id of the request that an event was published for; None if of none."""
    try:
        return dict(list_headers(message)).get(REQUEST_HEADER)
    except RecordError:
        # It is of another producer: all headers of ours can be read.
        return None
