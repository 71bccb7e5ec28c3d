"""The records that wait in memory, and the reader that fetches them.

All that wait are bounded in bytes. While they are full, nothing is polled. A partition
that has more than its share is paused, so that the others go on.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from confluent_kafka import OFFSET_BEGINNING

from jobs_lib import telemetry
from jobs_lib.coordination.messages import Shared
from jobs_lib.coordination.record import count_bytes
from jobs_lib.kafka.hand_reader import HandReader

if TYPE_CHECKING:
    from confluent_kafka import Message

    from jobs_lib.kafka.poller import Partition
    from jobs_lib.settings import Settings


class Part:
    """A partition that is held, with the records that wait."""

    def __init__(self, shared: Shared, position: int | None) -> None:
        self.shared = shared
        self.position = position
        """Where the next batch begins; None for the oldest record there is."""
        self.waiting: deque[Message] = deque()
        self.waiting_bytes = 0
        self.is_begun = False
        """Whether it is to be read."""
        self.is_read = False
        """Whether records that arrive are those from the position on."""
        self.is_standing = False
        """Whether it stands still until an operator sets its position."""
        self.is_leaving = False
        self.is_lost = False
        self.is_busy = False
        """Whether the handler has a batch of it."""
        self.failures = 0
        self.retry_at = 0.0
        self.served = 0
        """When it had its turn last, in turns."""
        self._next_fetch: int | None = position
        self._is_paused = False

    @property
    def partition(self) -> Partition:
        """As Kafka's client names it."""
        return self.shared.topic, self.shared.partition

    @property
    def origin(self) -> str:
        """The partition as ``topic/partition``."""
        return f"{self.shared.topic}/{self.shared.partition}"

    def begin(self, reader: HandReader) -> None:
        """Read from the position on, also if it was read before."""
        self.waiting.clear()
        self.waiting_bytes = 0
        self._is_paused, self.is_begun, self.is_read = False, True, False
        self._next_fetch = self.position
        at = OFFSET_BEGINNING if self.position is None else self.position
        reader.assign(self.partition, at)

    def push(self, messages: list[Message], reader: HandReader, most: int) -> None:
        """Add records that have arrived, in their order."""
        wanted = self._next_fetch
        if wanted is not None and (messages[0].offset() or 0) < wanted:
            messages = [one for one in messages if (one.offset() or 0) >= wanted]
            if not messages:
                return
        self._next_fetch = (messages[-1].offset() or 0) + 1
        self.waiting.extend(messages)
        self.waiting_bytes += count_bytes(messages)
        if self.waiting_bytes >= most and not self._is_paused:
            self._is_paused = True
            reader.pause(self.partition)

    def pop(self, before: int, reader: HandReader, most: int) -> None:
        """Drop the waiting records before an offset, and read on if few are left."""
        gone = []
        while self.waiting and (self.waiting[0].offset() or 0) < before:
            gone.append(self.waiting.popleft())
        self.waiting_bytes -= count_bytes(gone)
        self.position = before
        if self._is_paused and 2 * self.waiting_bytes < most:
            self._is_paused = False
            reader.begin(self.partition, self._next_fetch)
        reader.poll_soon()


class Intake:
    """The held partitions of a group, with their waiting records.

    Attributes:
        parts: by partition.
        changed: guards it, and the parts; notified when there is more to do.
    """

    def __init__(self, settings: Settings, group: str) -> None:
        self.changed = threading.Condition()
        self.parts: dict[Shared, Part] = {}
        self.reader = HandReader(settings, group)
        self._group = group
        self._most_bytes = settings.consumer_prefetch_bytes
        self.reader.listen(self)

    @property
    def share(self) -> int:
        """The bytes that each partition may have."""
        return self._most_bytes // max(1, len(self.parts))

    def add(self, part: Part) -> None:
        """Add a partition; it is not read yet."""
        with self.changed:
            self.parts[part.shared] = part
            self.changed.notify_all()

    def remove(self, part: Part) -> None:
        """Read a partition no more."""
        with self.changed:
            if self.parts.get(part.shared) is part:
                del self.parts[part.shared]
                self.reader.unassign(part.partition)
            self.changed.notify_all()

    # What the reader calls

    def has_room(self) -> bool:
        """See :class:`jobs_lib.kafka.poller.MemberListener`."""
        with self.changed:
            waiting = sum(part.waiting_bytes for part in self.parts.values())
            return waiting < self._most_bytes

    def received(self, messages: list[Message]) -> None:
        """See :class:`jobs_lib.kafka.poller.MemberListener`."""
        found: defaultdict[Any, list[Message]] = defaultdict(list)
        for message in messages:
            found[message.topic(), message.partition()].append(message)
        with self.changed:
            for partition, some in found.items():
                part = self.parts.get(Shared(self._group, *partition))
                if part is not None and part.is_read and not part.is_standing:
                    part.push(some, self.reader, self.share)
            self.changed.notify_all()

    def out_of_range(self, partition: Partition, start: int, end: int) -> None:
        """See :class:`jobs_lib.kafka.poller.MemberListener`."""
        with self.changed:
            part = self.parts.get(Shared(self._group, *partition))
            if part is None or part.position is None:
                return
            part.is_standing = True
        told = (
            f"no record has this offset: those from {start} to before {end} are there. "
            "It waits until the group's position is set"
        )
        report_lost(self._group, part, told, start, end)

    def lost(self, partitions: frozenset[Partition]) -> None:
        """See :class:`jobs_lib.kafka.poller.MemberListener`."""
        # The client has failed. Another one reads on.
        with self.changed:
            for partition in partitions:
                part = self.parts.get(Shared(self._group, *partition))
                if part is not None and part.is_begun:
                    part.begin(self.reader)

    def begun(self, partition: Partition) -> None:
        """See :class:`jobs_lib.kafka.poller.MemberListener`."""
        # What arrived before was asked for when the partition was held before.
        with self.changed:
            part = self.parts.get(Shared(self._group, *partition))
            if part is not None:
                part.is_read = part.is_begun

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """See :class:`jobs_lib.kafka.poller.MemberListener`."""

    def revoked(self, partitions: frozenset[Partition]) -> None:
        """See :class:`jobs_lib.kafka.poller.MemberListener`."""

    def committed(self, offsets: dict[Partition, int]) -> None:
        """See :class:`jobs_lib.kafka.poller.MemberListener`."""


def report_lost(
    group: str, part: Part, told: str, start: int | None, end: int | None
) -> None:
    """Report that a partition stands still."""
    telemetry.emit(
        "offset.lost",
        group=group,
        origin=part.origin,
        next_offset=part.position,
        start=start,
        end=end,
        error=told,
    )
