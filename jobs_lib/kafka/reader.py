"""Read parts of partitions without a group, and end where they end.

The reader ends by position, never by a count of records or by the offset of the last
one. A part may end with offsets that have no record for it: compaction has removed
them, they are markers of transactions, or their transaction was aborted.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    Message,
    TopicPartition,
)

from jobs_lib.errors import OffsetError
from jobs_lib.kafka.client import find_leaders, list_partitions, make_consumer
from jobs_lib.kafka.patience import read_range
from jobs_lib.kafka.refusal import SILENT, explain, missing_topics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jobs_lib.errors import AccessError
    from jobs_lib.kafka.member import Partition
    from jobs_lib.settings import Settings

_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 5.0
_PATIENCE = 30.0
_PASSING = {*SILENT, KafkaError._UNKNOWN_PARTITION}
"""Also that of a client which hears of partitions that are there anew."""


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a partition to read: from ``start`` to before ``end``."""

    start: int | None
    """The offset of the first record; None for the oldest one that there is."""
    end: int
    """The position at which it ends, such as the partition's end at some time."""


class PartsReader:
    """Reads parts of partitions that it assigns to itself; commits nothing.

    Use it as a context manager, and iterate over it once::

        with PartsReader(settings, {("orders", 0): Span(None, 700)}, group) as reader:
            for partition, messages in reader:
                ...

    Each item is a partition, and some of its committed records in the order of their
    offsets. The loop ends when every part was read to its end.
    """

    def __init__(
        self,
        settings: Settings,
        spans: Mapping[Partition, Span],
        group: str,
        *,
        most: int = 1_000,
        patience: float = _PATIENCE,
        sees_uncommitted: bool = False,
    ) -> None:
        """Check the parts, and assign them.

        Args:
            settings: where Kafka is.
            spans: what to read of each partition.
            group: names the client; it joins no group of that name, and commits
                nothing.
            most: the most records that are fetched for one item.
            patience: seconds that may pass without progress in any partition, while
                the reader waits for Kafka.
            sees_uncommitted: whether it gives what transactions may still take back. It
                waits for none of them then.

        Raises:
            AccessError: the brokers do not let it in.
            OffsetError: a partition does not exist, or a part has impossible offsets.
            TopicError: a topic does not exist, or is not visible.
            UnavailableError: no broker answers.
        """
        self._settings = settings
        self._spans = dict(spans)
        self._most = most
        self.patience = patience
        """As given; it may be changed at any time."""
        self._refusals: deque[AccessError] = deque(maxlen=1)
        self.positions: dict[Partition, int] = {
            partition: span.start or 0 for partition, span in spans.items()
        }
        """How far each partition was read: all that lies before, in its part, was
        given out once the loop asks for the next item."""
        self._open = {
            partition
            for partition, span in spans.items()
            if span.end > (span.start or 0)
        }
        """The partitions whose end is not reached."""
        self._begun: set[Partition] = set()
        """Those of which Kafka has given something."""
        self._check()
        self._consumer: Consumer = make_consumer(
            settings,
            group,
            self._refusals.append,
            reports_ends=True,
            sees_uncommitted=sees_uncommitted,
        )
        try:
            places = [self._place(one) for one in self._open]
            find_leaders(self._consumer, places)
            self._consumer.incremental_assign(places)
        except BaseException:
            self._consumer.close()
            raise

    def __enter__(self) -> Self:
        """Return it; nothing is read yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close the client."""
        self._consumer.close()

    def __iter__(self) -> Iterator[tuple[Partition, list[Message]]]:
        """Read until all parts have ended.

        Raises:
            AccessError: Kafka denies the right to read a topic.
            OffsetError: no record has the next offset any more; or there is no progress
                although a broker answers.
            UnavailableError: there is no progress, and no broker answers.
        """
        moved_at = time.monotonic()
        while self._open:
            before = self._sum_positions()
            for partition, messages in self._fetch().items():
                yield partition, messages
                moved_at = time.monotonic()
            if self._sum_positions() != before:
                moved_at = time.monotonic()
            elif time.monotonic() > moved_at + self.patience:
                self._give_up()

    def leave(self, partition: Partition) -> None:
        """Read no more of a partition; the loop goes on with the others."""
        self._move(partition, self._spans[partition].end)
        self._end_parts()

    def _fetch(self) -> dict[Partition, list[Message]]:
        """Fetch some records, and note how far each partition is."""
        first = self._consumer.poll(_POLL_SECONDS)
        found: dict[Partition, list[Message]] = {}
        if first is None:
            # An aborted transaction moves only the position.
            self._note_positions()
        else:
            messages = [first, *self._consumer.consume(self._most - 1, 0)]
            if not self._take(messages, found):
                for message in messages:
                    self._sort(message, found)
        if self._refusals:
            raise self._refusals.pop()
        self._end_parts()
        return found

    def _take(
        self, messages: list[Message], found: dict[Partition, list[Message]]
    ) -> bool:
        """Take all records of the only part at once; returns whether it could.

        Each call of a message's method costs a tenth of what the client needs for it.
        """
        if len(self._spans) > 1 or any(map(Message.error, messages)):
            return False
        ((partition, span),) = self._spans.items()
        while messages and (messages[-1].offset() or 0) >= span.end:
            messages.pop()
            self._move(partition, span.end)
        if messages:
            found[partition] = messages
            self._move(partition, (messages[-1].offset() or 0) + 1)
        return True

    def _sort(self, message: Message, found: dict[Partition, list[Message]]) -> None:
        """Put a record to those of its partition; note where a partition ends."""
        partition = (message.topic() or "", message.partition() or 0)
        error = message.error()
        if partition not in self._open:
            # Fetched before its part ended, or an error of a broker or the group.
            if error is not None and partition[0]:
                self._refuse(error, partition)
            return
        offset = message.offset() or 0
        if error is None:
            if offset < self._spans[partition].end:
                found.setdefault(partition, []).append(message)
            self._move(partition, offset + 1)
        elif error.code() == KafkaError._PARTITION_EOF:
            self._move(partition, offset)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._refuse_start(partition)
        else:
            self._refuse(error, partition)

    def _move(self, partition: Partition, position: int) -> None:
        self._begun.add(partition)
        self.positions[partition] = max(position, self.positions[partition])

    def _note_positions(self) -> None:
        places = self._consumer.position([TopicPartition(*one) for one in self._open])
        for at in places:
            # Negative until the first record or marker has arrived.
            if at.offset >= 0:
                self._move((at.topic, at.partition), at.offset)

    def _end_parts(self) -> None:
        """Stop reading partitions that have reached their ends."""
        ended = {
            one for one in self._open if self.positions[one] >= self._spans[one].end
        }
        if ended:
            self._open -= ended
            self._consumer.incremental_unassign([TopicPartition(*one) for one in ended])

    def _sum_positions(self) -> int:
        return sum(self.positions.values())

    def _place(self, partition: Partition) -> TopicPartition:
        start = self._spans[partition].start
        offset = OFFSET_BEGINNING if start is None else start
        return TopicPartition(*partition, offset)

    # What is refused

    def _check(self) -> None:
        for partition, span in self._spans.items():
            if span.end < 0 or (span.start is not None and span.start < 0):
                raise OffsetError(
                    f"{_spell(partition)} cannot be read from {span.start} to "
                    f"{span.end}: offsets begin with 0",
                    partition,
                    span.start,
                )
        topics = {topic for topic, _ in self._spans}
        counts = list_partitions(self._settings, topics, _ANSWER_SECONDS)
        if missing := sorted(topic for topic in topics if not counts[topic]):
            raise missing_topics(self._settings, missing)
        for partition in self._spans:
            topic, number = partition
            if not 0 <= number < counts[topic]:
                raise OffsetError(
                    f"{_spell(partition)} does not exist: {topic!r} has the "
                    f"partitions 0 to {counts[topic] - 1}",
                    partition,
                    None,
                )

    def _refuse(self, error: KafkaError, partition: Partition) -> None:
        """Raise what does not pass; go on where librdkafka tries again."""
        if error.code() in _PASSING or error.retriable():
            return
        raise explain(error, self._settings, partition[0], "READ")

    def _refuse_start(self, partition: Partition) -> None:
        """Raise the reason why no record has the offset at which to go on."""
        start, end = self._read_range(partition)
        span = self._spans[partition]
        if span.start is None and partition not in self._begun:
            # The oldest record was deleted while the client asked for it.
            at = self._place(partition)
            self._consumer.incremental_unassign([at])
            self._consumer.incremental_assign([at])
            return
        # Markers and gaps behind the last record may have moved it further.
        wanted = self.positions[partition]
        if wanted < start:
            told = (
                f"{start - wanted} offsets before {start} are gone, by retention or a "
                f"cut log. Read from {start} on"
            )
        else:
            told = "the topic was made anew or restored. Read from its start"
        raise OffsetError(
            f"{_spell(partition)} has no record at offset {wanted}, only from {start} "
            f"to before {end}: {told}",
            partition,
            wanted,
            start,
            end,
        )

    def _give_up(self) -> None:
        """Raise the reason why no partition goes on."""
        partition = min(self._open)
        start, end = self._read_range(partition)
        wanted = self.positions[partition]
        raise OffsetError(
            f"{_spell(partition)} is read up to offset {wanted}, and for "
            f"{self.patience:g} s nothing has followed before the wanted end "
            f"{self._spans[partition].end}; it has the offsets {start} to before {end} "
            "now. A transaction may be open in it, or the topic was made anew: read "
            "again, to the end that it has then",
            partition,
            wanted,
            start,
            end,
        )

    def _read_range(self, partition: Partition) -> tuple[int, int]:
        """Ask for the oldest offset of a partition and its end."""
        return read_range(self._consumer, self._settings, partition, _ANSWER_SECONDS)


def _spell(partition: Partition) -> str:
    topic, number = partition
    return f"{topic}/{number}"
