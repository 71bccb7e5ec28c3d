"""Offsets that are committed to Kafka after the database has them: they never lead.

All of them are committed again and again. A group that shares its partitions without
Kafka has no members there. So Kafka lets others replace its offsets, such as a process
that stood still, and forgets those that nobody commits for some days.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping

    from jobs_lib.consuming.measures import Measures
    from jobs_lib.kafka.member import GroupMember, Partition

_PAUSE = 1.0
_AGAIN = 10.0
"""Seconds after which all offsets are told again."""


class Commits:
    """The offsets of one group that are to be committed to Kafka."""

    def __init__(
        self, member: GroupMember, lock: threading.Condition, measures: Measures
    ) -> None:
        """Begin with nothing.

        Args:
            member: commits them.
            lock: guards the partitions, and what is noted here.
            measures: know how far partitions are, and where no record follows.
        """
        self._member = member
        self._lock = lock
        self._measures = measures
        self._untold: dict[Partition, int] = {}
        """Offsets that Kafka has not acknowledged yet."""
        self._told: dict[Partition, int] = {}
        """Those that it has acknowledged."""
        self._told_at = 0.0
        self._again_at = time.monotonic() + _AGAIN

    def note(self, partition: Partition, offset: int) -> None:
        """Note where a partition goes on; call under the lock."""
        self._untold[partition] = offset

    def note_anew(self, partition: Partition) -> None:
        """Note that a partition has other records than before; call under the lock.

        Its topic was made anew, or it ended before its offset. None of those counts as
        handled. The offset would lead, whether it waits here or was told until somebody
        noticed.
        """
        self.note(partition, 0)

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Forget partitions that others own now; call under the lock."""
        for partition in partitions:
            self._untold.pop(partition, None)
            self._told.pop(partition, None)

    def note_committed(self, offsets: Mapping[Partition, int]) -> None:
        """Note that Kafka has these offsets now."""
        with self._lock:
            self._told.update(offsets)
            for partition, offset in offsets.items():
                if self._untold.get(partition) == offset:
                    del self._untold[partition]

    def note_reached(self, positions: Mapping[Partition, int]) -> None:
        """Let Kafka be told how far partitions are read that have no more records.

        A transaction ends with a marker behind its last record, and of some partitions
        nothing but markers is left. Kafka's tools, and others that wait for this group,
        would see some offsets too few for ever.
        """
        with self._lock:
            for partition, (stored, place) in self._measures.note(positions).items():
                if stored is not None and stored >= place:
                    continue
                if self._told.get(partition) != place:
                    self._untold[partition] = place

    def tell(self, now: bool = False) -> None:
        """Tell Kafka the offsets, again and again until it has acknowledged them.

        Args:
            now: without a pause since the last time.
        """
        with self._lock:
            at = time.monotonic()
            if self._is_time_again(at):
                self._untold = self._measures.find_places() | self._untold
            if not self._untold or (not now and at - self._told_at < _PAUSE):
                return
            offsets = dict(self._untold)
            self._told_at = at
        self._member.commit(offsets)

    def _is_time_again(self, now: float) -> bool:
        late = now - self._again_at
        if late < 0:
            return False
        self._again_at = now + _AGAIN
        # A process that stood still may have lost its partitions, and not know it yet.
        return late < _AGAIN
