"""The records that wait in memory, a queue for each partition, and whose turn it is.

All queues together are bounded in bytes. While they are full, the poll thread does not
poll, and Kafka's client keeps what it has fetched. If they stay full, the partitions
that move slowly are paused, so that others go on, and the poll thread hears of the
group. To pause throws away what the client has fetched: it is done as rarely as that.
"""

from __future__ import annotations

import threading
import time
from itertools import groupby
from operator import methodcaller
from typing import TYPE_CHECKING

from jobs_lib.consuming.progress import get_offset
from jobs_lib.consuming.share import LONG_SECONDS
from jobs_lib.kafka.fullness import Fullness

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from confluent_kafka import Message

    from jobs_lib.consuming.progress import Progress
    from jobs_lib.kafka.member import GroupMember, Partition

_TURN_SECONDS = 0.5
"""How long a partition may wait for its turn while others have larger blocks."""
_WAIT_SECONDS = 0.1

# Each record passes here: these are twice as fast as functions of our own.
_GET_TOPIC, _GET_NUMBER = methodcaller("topic"), methodcaller("partition")
_GET_OFFSET = methodcaller("offset")


class Queues:
    """The owned partitions of a group, with their waiting records.

    Attributes:
        partitions: the progress of each.
        changed: guards it, and the fields of each; notified of what workers wait for.
    """

    def __init__(self, member: GroupMember, prefetch_bytes: int) -> None:
        """Begin without partitions; ``prefetch_bytes`` may wait in memory."""
        self.partitions: dict[Partition, Progress] = {}
        self.changed = threading.Condition()
        self._member = member
        self._prefetch_bytes = prefetch_bytes
        self._fullness = Fullness(prefetch_bytes)

    def has_room(self) -> bool:
        """Whether more records may wait; pauses those that have been slow for long."""
        with self.changed:
            flowing = [one for one in self.partitions.values() if not one.paused]
            waiting = sum(one.waiting_bytes for one in flowing)
            # While they are full, news of the group wait, too.
            if not self._fullness.lasts(waiting):
                return waiting < self._prefetch_bytes
            for progress in flowing:
                if progress.waiting_bytes >= self._share:
                    progress.paused, progress.reading = True, False
                    # Else the log may not have them any more.
                    if progress.range is None:
                        progress.let_go(self._share)
                    self._member.pause(progress.partition)
            return True

    def add(self, messages: list[Message]) -> None:
        """Queue records that have arrived."""
        with self.changed:
            for partition, some in group_by_partition(messages):
                progress = self.partitions.get(partition)
                if progress is None or progress.leaving or not progress.reading:
                    continue
                # A topic that was cut or made anew begins below the stored offset. And
                # a client that assigns all partitions again may read some twice.
                first = progress.next_fetch or 0
                if min(map(_GET_OFFSET, some)) < first:
                    some = [one for one in some if get_offset(one) >= first]
                progress.push(some)
            self.changed.notify_all()

    def take(self) -> Progress | None:
        """Take the next partition with work, marked busy; None after a while."""
        with self.changed:
            now = time.monotonic()
            ready = [one for one in self.partitions.values() if one.is_ready(now)]
            if self._is_one_enough(now):
                ready = [one for one in ready if not one.competes]
            if not ready:
                self.changed.wait(_WAIT_SECONDS)
                return None
            return self._choose(ready, now)

    def take_ahead(self) -> Progress | None:
        """Take a partition whose next block may be read before its turn, if any."""
        with self.changed:
            now = time.monotonic()
            ready = [
                one
                for one in self.partitions.values()
                if one.reads_ahead and one.waiting and one.is_settled
                if one.is_ready(now)
            ]
            return self._choose(ready, now) if ready else None

    def _is_one_enough(self, now: float) -> bool:
        """Whether a thread has a block that keeps it busy.

        A second thread would only compete with it for the interpreter. It helps once
        the first one waits for the database for long, such as for a lock.
        """
        begun = [
            one.taken_at
            for one in self.partitions.values()
            if one.busy and one.competes
        ]
        return bool(begun) and min(begun) > now - LONG_SECONDS

    def _choose(self, ready: list[Progress], now: float) -> Progress:
        # A large block costs little more than a small one, but each has its turn.
        first = min(ready, key=lambda progress: progress.taken_at)
        if now < first.taken_at + _TURN_SECONDS:
            first = max(ready, key=lambda progress: len(progress.waiting))
        others = [one for one in self.partitions.values() if one.busy]
        for one in others:
            one.is_alone = False
        first.busy, first.is_alone = True, not others
        first.taken_at = now
        return first

    def release(self, progress: Progress) -> None:
        """Let any worker take the partition again."""
        with self.changed:
            progress.busy, progress.taken, progress.ahead = False, 0, None
            self.changed.notify_all()

    def pause(self, progress: Progress) -> None:
        """Drop what waits, and fetch nothing until it is refilled, under the lock."""
        progress.drop_all()
        progress.paused, progress.reading = True, False
        self._member.pause(progress.partition)

    def refill(self, progress: Progress) -> None:
        """Read on where few records wait; the caller holds the lock."""
        if progress.paused and 2 * progress.waiting_bytes < self._share:
            progress.paused = False
            self._member.begin(progress.partition, progress.next_fetch)
        self._member.poll_soon()

    @property
    def _share(self) -> int:
        """The bytes that each partition may have if all have the same."""
        return self._prefetch_bytes // max(1, len(self.partitions))


def group_by_partition(
    messages: Iterable[Message],
) -> Iterator[tuple[Partition, list[Message]]]:
    """Group records that follow each other and are of one partition.

    Those of a partition mostly come together, and in the order of their offsets.
    """
    for topic, of_topic in groupby(messages, _GET_TOPIC):
        for number, some in groupby(of_topic, _GET_NUMBER):
            yield (topic or "", number or 0), [*some]
