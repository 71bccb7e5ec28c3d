"""How far a consumer is in its partitions, and how long it was busy."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from jobs_lib.consuming.progress import Progress
    from jobs_lib.kafka.member import GroupMember, Partition
    from jobs_lib.kafka.positions import Positions


@dataclass(slots=True)
class Lag:
    """How many offsets lie before the ends of some partitions of a topic.

    Those count, too, for which no record is left to apply.
    """

    total: int = 0
    highest: int = 0
    """That of the partition which is furthest behind."""


@dataclass(frozen=True, slots=True)
class GateWait:
    """A partition whose next record waits for other groups."""

    partition: Partition
    seconds: float
    """Since the record was found to wait."""
    after: str
    """The group that is furthest behind."""


class Measures:
    """The figures of one consumer; any thread may ask for them."""

    def __init__(
        self,
        member: GroupMember,
        partitions: Mapping[Partition, Progress],
        lock: threading.Condition,
    ) -> None:
        """Begin with nothing.

        Args:
            member: reads the partitions.
            partitions: those that the consumer owns, always the same object.
            lock: guards the partitions.
        """
        self.group = member.group
        self.gated: frozenset[str] = frozenset()
        """The topics whose records wait for other groups."""
        self._member = member
        self._partitions = partitions
        self._lock = lock
        self._seconds: dict[str, float] = defaultdict(float)
        self._reached: dict[Partition, tuple[int | None, int]] = {}
        """A stored offset, and the place up to which no record follows it."""

    def add_seconds(self, topic: str, seconds: float) -> None:
        """Add the seconds that a thread was busy with a block; call under the lock."""
        self._seconds[topic] += seconds

    def read_seconds(self) -> dict[str, float]:
        """Read the seconds in which threads were busy with records, by topic."""
        with self._lock:
            return dict(self._seconds)

    def find_waits(self) -> list[GateWait]:
        """Find the owned partitions that wait for other groups, the longest first."""
        now = time.monotonic()
        with self._lock:
            waits = [
                GateWait(partition, now - held.since, held.wait.dependency.group)
                for partition, progress in self._partitions.items()
                if (held := progress.held) is not None and not progress.leaving
            ]
        return sorted(waits, key=lambda one: -one.seconds)

    def find_lags(self, positions: Positions, within: float) -> dict[str, Lag]:
        """Find how far the owned partitions are behind their ends, by topic.

        Topics are left out of which that is not known of each owned partition. The
        call is the question for the next answer.

        Args:
            positions: says where topics begin and end.
            within: seconds, the age of what it says at most.
        """
        self._member.ask_positions(self.note)
        with self._lock:
            places = {
                partition: self._find_place(partition, progress)
                for partition, progress in self._partitions.items()
                if not progress.leaving
            }
        lags: dict[str, Lag] = {}
        for topic in {topic for topic, _ in places}:
            ends = positions.ask_ends(topic, within=within)
            starts = positions.ask_starts(topic, within=within)
            if ends is None or starts is None:
                continue
            found = []
            for (name, number), place in places.items():
                if name == topic:
                    # Without an offset it begins with the oldest record.
                    at = starts.offsets.get(number) if place is None else place
                    end = ends.offsets.get(number)
                    found.append(None if at is None or end is None else end - at)
            known = [max(0, one) for one in found if one is not None]
            if len(known) == len(found):
                lags[topic] = Lag(sum(known), max(known))
        return lags

    def find_reached(self, partition: Partition, stored: int | None) -> int | None:
        """The place up to which no record follows this stored offset of a partition."""
        with self._lock:
            found = self._reached.get(partition)
        return found[1] if found is not None and found[0] == stored else stored

    def find_places(self) -> dict[Partition, int]:
        """Find where the owned partitions go on, as Kafka should have it.

        Those are left out of which that is in doubt. Of a topic that was made anew
        nothing is handled, and nobody knows what is of one that ended before.
        """
        with self._lock:
            return {
                partition: 0
                if progress.has_other_records
                else self._find_place(partition, progress) or 0
                for partition, progress in self._partitions.items()
                if not (progress.leaving or progress.in_doubt)
            }

    def _find_place(self, partition: Partition, progress: Progress) -> int | None:
        stored, reached = self._reached.get(partition, (None, None))
        if reached is not None and stored == progress.stored:
            return reached
        return progress.stored

    def note(
        self, positions: Mapping[Partition, int]
    ) -> Mapping[Partition, tuple[int | None, int]]:
        """Note how far the client has read, in the poll thread.

        The markers of transactions and the gaps of compaction lie behind the last
        record. The client passes them over, but the stored offset does not: a partition
        in which nothing waits would seem to be behind for ever.

        Returns of each such partition the stored offset, and the place up to which no
        record follows it.
        """
        with self._lock:
            self._reached = {
                partition: (progress.stored, place)
                for partition, progress in self._partitions.items()
                if progress.reading
                and not (progress.waiting or progress.busy)
                and not (progress.in_doubt or progress.replaced)
                and (place := positions.get(partition)) is not None
                and place >= (progress.stored or 0)
            }
            return self._reached
