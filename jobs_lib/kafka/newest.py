"""Find the newest record of a key: read its partition backwards from the end.

A topic has no index of keys, and may have millions of records. So a search has a time,
and says from which offset on it has looked.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from jobs_lib.errors import OffsetError
from jobs_lib.kafka.client import (
    as_uuid,
    list_partitions,
    make_admin,
    make_consumer,
)
from jobs_lib.kafka.refusal import SILENT, explain, missing_topics
from jobs_lib.partitioner import choose_partition

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from jobs_lib.errors import AccessError
    from jobs_lib.settings import Settings

SECONDS = 0.3
_GROUP = "jobs_lib-where"
"""Names the client; no group of this name is joined."""
_ANSWER_SECONDS = 2.0
_REASON_SECONDS = 1.0
_POLL_SECONDS = 0.05
_FIRST, _MOST = 1_000, 32_000
"""Offsets of the first part that is read, and of the largest one."""
_BATCH = 2_000


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest committed record of a key in its partition, as far as was looked."""

    partition: int
    start: int
    """The offset of the oldest record of the partition."""
    end: int
    """The offset that the next committed record will have."""
    written: int
    """The offset behind all records, higher than the end if a transaction is open."""
    looked_from: int
    """All records from here to the end were looked at."""
    message: Message | None
    """None if none of them has the key."""
    topic_id: UUID | None
    """The topic, as Kafka names it for ever; None if that is not known."""


def find_newest(
    settings: Settings,
    topic: str,
    key: str,
    *,
    seconds: float = SECONDS,
    partition: int | None = None,
) -> Newest:
    """Find the newest record of a key.

    Args:
        settings: where Kafka is.
        topic: by its name in Kafka.
        key: the key's text.
        seconds: how long to read. The last thousand offsets are always read.
        partition: where the key is; by default where this library's producers and
            Java's put it.

    Raises:
        AccessError: the brokers do not let it in, or deny the right to read.
        OffsetError: the topic has no such partition.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers.
    """
    refusals: deque[AccessError] = deque(maxlen=1)
    consumer = make_consumer(
        settings, _GROUP, refusals.append, reports_ends=True, waits_at_end=False
    )
    # It answers while the consumer reads.
    admin = cast("Any", make_admin(settings, refusals.append))
    asked = admin.describe_topics(
        TopicCollection([topic]), request_timeout=_ANSWER_SECONDS
    )
    try:
        count = _count_partitions(consumer, settings, topic)
        number = choose_partition(key, count) if partition is None else partition
        if number >= count:
            raise OffsetError(
                f"{topic}/{number} does not exist: {topic!r} has the partitions 0 to "
                f"{count - 1}",
                (topic, number),
                None,
            )
        # Before the end: what is committed meanwhile must not seem to be open.
        written = _find_written(admin, TopicPartition(topic, number))
        search = _Search(consumer, topic, number, key.encode())
        return search.run(seconds, written, lambda: _read_id(asked[topic]))
    except KafkaException as failure:
        error: KafkaError = failure.args[0]
        if refusals:
            raise refusals.pop() from None
        if error.code() in SILENT:
            # Raises the reason, which this client does not know.
            list_partitions(settings, [topic], _REASON_SECONDS)
        raise explain(error, settings, topic, "READ") from None
    finally:
        consumer.close()


def _count_partitions(consumer: Consumer, settings: Settings, topic: str) -> int:
    there = consumer.list_topics(topic, timeout=_ANSWER_SECONDS).topics.get(topic)
    if there is None or there.error is not None or not there.partitions:
        raise missing_topics(settings, [topic])
    return len(there.partitions)


def _find_written(admin: Any, place: TopicPartition) -> int:
    """Find the offset behind all records, with those of open transactions."""
    asked = admin.list_offsets(
        {place: cast("Any", OffsetSpec).latest()},
        isolation_level=IsolationLevel.READ_UNCOMMITTED,
        request_timeout=_ANSWER_SECONDS,
    )
    return int(asked[place].result().offset)


def _read_id(answer: Any) -> UUID | None:
    try:
        return as_uuid(answer.result().topic_id)
    except KafkaException:
        return None


class _Search:
    """Reads one partition backwards, a part after the other."""

    def __init__(
        self, consumer: Consumer, topic: str, partition: int, key: bytes
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._partition = partition
        self._key = key

    def run(
        self, seconds: float, written: int, read_id: Callable[[], UUID | None]
    ) -> Newest:
        """Read until the key is found, all is read, or the time is over."""
        start, end = self._ask(OFFSET_BEGINNING), self._ask(OFFSET_END)
        deadline = time.monotonic() + seconds
        looked_from, size = end, _FIRST
        message = None
        while message is None and looked_from > start:
            low = max(start, looked_from - size)
            # The first part is short, and there must be an answer.
            until = deadline if looked_from < end else deadline + _ANSWER_SECONDS
            if not self._go_to(low, looked_from, until):
                break
            message, looked_from = self._found, low
            size = min(2 * size, _MOST)
        return Newest(
            self._partition, start, end, written, looked_from, message, read_id()
        )

    def _ask(self, place: int) -> int:
        asked = [TopicPartition(self._topic, self._partition, place)]
        # This consumer reads committed records, so Kafka ends the partition for it
        # before the first record of an open transaction.
        (found,) = self._consumer.offsets_for_times(asked, timeout=_ANSWER_SECONDS)
        if found.error is not None:
            raise KafkaException(found.error)
        return found.offset

    def _go_to(self, low: int, high: int, deadline: float) -> bool:
        """Read the records from ``low`` to before ``high``; False if not to the end."""
        self._found: Message | None = None
        at = TopicPartition(self._topic, self._partition, low)
        self._consumer.assign([at])
        position = low
        while position < high:
            if time.monotonic() > deadline:
                return False
            first = self._consumer.poll(_POLL_SECONDS)
            if first is None:
                # A transaction that was aborted moves only the position.
                (now,) = self._consumer.position([at])
                position = max(position, now.offset)
                continue
            for message in (first, *self._consumer.consume(_BATCH, 0)):
                if (reached := self._look(message, low, high)) is None:
                    return False
                position = max(position, reached)
        return True

    def _look(self, message: Message, low: int, high: int) -> int | None:
        """Look at a record; returns the position behind it, or None if there is none.

        Raises:
            KafkaException: the broker refuses to give records.
        """
        error = message.error()
        offset = message.offset() or 0
        if error is None:
            if low <= offset < high and message.key() == self._key:
                self._found = message
            return offset + 1
        if error.code() == KafkaError._PARTITION_EOF:
            return offset
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            # These records were deleted meanwhile.
            return None
        if error.code() in SILENT or error.retriable():
            return low
        raise KafkaException(error)
