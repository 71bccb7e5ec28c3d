"""The partitions of a group whose records are read, and the order of their turns.

All records that wait in memory are bounded in bytes. While they are full, nothing is
polled. If they stay full, the partitions that have more than their share are paused,
and let go what is above it, so that the others go on. To pause throws away what Kafka's
client has fetched: it is done as rarely as that. The thread that reads gives the turns,
too.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import defaultdict, deque
from itertools import count
from typing import TYPE_CHECKING, Any

from confluent_kafka import OFFSET_BEGINNING

from jobs_lib import telemetry
from jobs_lib.coordination.messages import Shared
from jobs_lib.kafka.fullness import Fullness
from jobs_lib.kafka.hand_reader import HandReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Message

    from jobs_lib.coordination.part import Part
    from jobs_lib.kafka.poller import Partition
    from jobs_lib.settings import Settings


class Intake:
    """The held partitions of a group, with their waiting records.

    Attributes:
        parts: by partition.
        lock: guards it, and the parts: other threads add and remove them.
    """

    def __init__(
        self, settings: Settings, group: str, work: Callable[[], float]
    ) -> None:
        self.lock = threading.RLock()
        self.parts: dict[Shared, Part] = {}
        self.reader = HandReader(settings, group, work)
        self._group = group
        self._most_bytes = settings.consumer_prefetch_bytes
        self._flowing_bytes = 0
        """Of the waiting records of all partitions that are not paused."""
        self._fullness = Fullness(self._most_bytes)
        self._unweighed: set[Part] = set()
        """Those to which records have come since the last poll: most are handled before
        the next one, and never counted."""
        self._ready: deque[Part] = deque()
        """Those with something to do, each in its turn."""
        self.turn: Part | None = None
        """The partition that has its turn."""
        self._resting: list[tuple[float, int, Part]] = []
        """A heap of those that have to wait, by the time of their end."""
        self._numbers = count()
        self.reader.listen(self)

    def add(self, part: Part) -> None:
        """Add a partition; it is not read yet."""
        with self.lock:
            self.parts[part.shared] = part
            self._queue(part)

    def remove(self, part: Part) -> None:
        """Read a partition no more."""
        with self.lock:
            if self._has(part):
                del self.parts[part.shared]
                self._flowing_bytes -= part.flowing_bytes
                self.reader.unassign(part.partition)

    def choose(self) -> Part | None:
        """Choose a partition with something to do, for a turn that :meth:`end` ends."""
        with self.lock:
            now = time.monotonic()
            while self._resting and self._resting[0][0] <= now:
                self._ready.append(heapq.heappop(self._resting)[-1])
            while self._ready:
                part = self._ready.popleft()
                part.is_queued = False
                if part.has_work:
                    self.turn = part
                    return part
            return None

    def find_rest(self) -> float:
        """Find the seconds until a partition that waits may have its turn."""
        with self.lock:
            if self._ready:
                return 0.0
            if not self._resting:
                return math.inf
            return max(0.0, self._resting[0][0] - time.monotonic())

    def end(self, part: Part) -> bool:
        """End the turn of a partition; return whether it is to be let go."""
        with self.lock:
            self.turn = None
            self._queue(part)
            return part.is_leaving and not part.is_lost

    def begin(self, part: Part) -> None:
        """Read a partition from its position on, also if it was read before."""
        with self.lock:
            if not self._has(part):
                return
            self._flowing_bytes -= part.flowing_bytes
            part.begin()
            self._assign(part)

    def settle_range(self, part: Part) -> None:
        """Let a partition stand still whose next records are gone.

        Those in memory come first: the log may not have them any more.
        """
        with self.lock:
            if part.range is None or part.peek(1) or not self._has(part):
                return
            if part.position is None:
                # A new group begins with the oldest record, whichever that is now.
                self.begin(part)
                return
            start, end = part.range
            part.is_standing, part.range = True, None
        told = (
            f"no record has this offset: those from {start} to before {end} are there. "
            "It waits until the group's position is set"
        )
        report_lost(self._group, part, told, start, end)

    def peek(self, part: Part, most: int) -> list[Message]:
        """Return the first waiting records of a partition."""
        with self.lock:
            return part.peek(most)

    def drop(self, part: Part, before: int) -> None:
        """Drop the waiting records before an offset, and read on if few are left."""
        with self.lock:
            flowed, fetched = part.flowing_bytes, part.next_fetch
            part.drop(before)
            if not self._has(part):
                return
            if part.is_paused and 2 * part.waiting_bytes < self._share:
                part.is_paused = False
                self.reader.begin(part.partition, part.next_fetch)
            self._flowing_bytes += part.flowing_bytes - flowed
            if part.range is not None and before > (fetched or 0):
                # The range was told of a place before this one.
                self.begin(part)

    @property
    def _share(self) -> int:
        """The bytes that each partition may have."""
        return self._most_bytes // max(1, len(self.parts))

    def _assign(self, part: Part) -> None:
        """Let the reader begin with the next record that has not come."""
        at = OFFSET_BEGINNING if part.next_fetch is None else part.next_fetch
        self.reader.assign(part.partition, at)

    def _has(self, part: Part) -> bool:
        """Whether it was not removed."""
        return self.parts.get(part.shared) is part

    def _queue(self, part: Part) -> None:
        """Let a partition wait for its turn, if there is something to do."""
        if part.is_queued or part is self.turn or not part.has_work:
            return
        part.is_queued = True
        if part.retry_at > time.monotonic():
            entry = (part.retry_at, next(self._numbers), part)
            heapq.heappush(self._resting, entry)
        else:
            self._ready.append(part)

    # What the reader calls

    def has_room(self) -> bool:
        """See :class:`jobs_lib.kafka.poller.PollListener`."""
        with self.lock:
            for part in filter(self._has, self._unweighed):
                flowed = part.flowing_bytes
                part.weigh()
                self._flowing_bytes += part.flowing_bytes - flowed
            self._unweighed.clear()
            if not self._fullness.lasts(self._flowing_bytes):
                return self._flowing_bytes < self._most_bytes
            for part in self.parts.values():
                if not part.is_paused and part.waiting_bytes >= self._share:
                    self._flowing_bytes -= part.flowing_bytes
                    part.pause(self._share)
                    self.reader.pause(part.partition)
            return True

    def received(self, messages: list[Message]) -> None:
        """See :class:`jobs_lib.kafka.poller.PollListener`."""
        found: defaultdict[Any, list[Message]] = defaultdict(list)
        for message in messages:
            found[message.topic(), message.partition()].append(message)
        with self.lock:
            for partition, lot in found.items():
                part = self.parts.get(Shared(self._group, *partition))
                if part is not None and part.is_read and not part.is_standing:
                    part.push(lot)
                    self._unweighed.add(part)
                    self._queue(part)

    def out_of_range(self, partition: Partition, start: int, end: int) -> None:
        """See :class:`jobs_lib.kafka.poller.PollListener`."""
        with self.lock:
            part = self.parts.get(Shared(self._group, *partition))
            # Else it was asked for something else since, and the broker answers that.
            if part is not None and part.is_read:
                part.range = (start, end)
                self._queue(part)

    def lost(self, partitions: frozenset[Partition]) -> None:
        """See :class:`jobs_lib.kafka.poller.PollListener`."""
        # The client has failed. Another one reads on, behind the records in memory.
        with self.lock:
            for partition in partitions:
                part = self.parts.get(Shared(self._group, *partition))
                if part is not None and part.is_begun:
                    flowed = part.flowing_bytes
                    part.read_on()
                    self._flowing_bytes += part.flowing_bytes - flowed
                    self._assign(part)

    def begun(self, partition: Partition) -> None:
        """See :class:`jobs_lib.kafka.poller.PollListener`."""
        # What arrived before was asked for when the partition was held before.
        with self.lock:
            part = self.parts.get(Shared(self._group, *partition))
            if part is not None:
                part.is_read = part.is_begun

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """See :class:`jobs_lib.kafka.poller.PollListener`."""

    def revoked(self, partitions: frozenset[Partition]) -> None:
        """See :class:`jobs_lib.kafka.poller.PollListener`."""

    def committed(self, offsets: dict[Partition, int]) -> None:
        """See :class:`jobs_lib.kafka.poller.PollListener`."""


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
