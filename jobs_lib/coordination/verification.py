"""Fold a whole log, and compare what it says with its last snapshots.

Members begin with snapshots, which other members have written. A member that was wrong
when it wrote one would mislead all that start later.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from jobs_lib.coordination.snapshots import Collector, Found, find_last
from jobs_lib.coordination.world import World
from jobs_lib.kafka.places import find_places
from jobs_lib.kafka.reader import PartsReader, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from confluent_kafka import Message as KafkaMessage

    from jobs_lib.settings import Settings

_GROUP = "jobs-lib-coordination"
"""Names the client; nobody joins a group of that name."""


class Result(StrEnum):
    """What the comparison of one partition of the log has shown."""

    SAME = "same"
    DIFFERS = "differs"
    NO_SNAPSHOT = "no snapshot"
    UNKNOWN = "unknown"
    """The beginning is gone, and no older snapshot tells what was said there."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A partition of the log that was folded, and compared with its last snapshot."""

    place: int
    result: Result
    as_of: int | None
    """The offset of the last record that the snapshot counts."""
    records: int
    """How many were folded."""
    digest: str | None
    """That of the snapshot."""
    folded: str | None
    """That of the world which was folded from the start."""


def verify(settings: Settings, topic: str) -> list[Verified]:
    """Fold each partition of a log from its start, and compare it with its snapshot.

    Of a log whose beginning is gone, it folds what follows the oldest snapshot.

    Raises:
        AccessError: Kafka does not let this client in, or denies a right.
        OffsetError: the log was cut meanwhile.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers.
    """
    starts = find_places(settings, topic, "start")
    ends = find_places(settings, topic, "end")
    ranges = {one: (start, ends[one]) for one, start in starts.items()}
    last = find_last(settings, topic, _GROUP, ranges, len(starts))
    folds = {one: _Fold(one, starts, last.get(one)) for one in starts}
    spans = {
        (topic, one): Span(starts[one], found.as_of + 1)
        for one, found in last.items()
        if found.as_of >= starts[one]
    }
    if spans:
        with PartsReader(settings, spans, _GROUP, sees_uncommitted=True) as reader:
            for (_, place), messages in reader:
                folds[place].add(messages)
    return [folds[one].compare() for one in sorted(folds)]


class _Fold:
    """The fold of one partition up to its last snapshot."""

    def __init__(
        self, place: int, starts: Mapping[int, int], last: Found | None
    ) -> None:
        start = starts[place]
        self._place = place
        self._partitions = len(starts)
        self._last = last
        self._world: World | None = World(place) if start == 0 else None
        self._begins_at = start
        self._before: list[tuple[int, int, bytes | None]] = []
        """What was read while nobody knows what the records before it have said."""
        self._collector = Collector()
        self._records = 0

    def add(self, messages: Iterable[KafkaMessage]) -> None:
        """Fold records, in their order."""
        for message in messages:
            value = message.value()
            raw = value.encode() if isinstance(value, str) else value
            offset, time_ms = message.offset() or 0, message.timestamp()[1]
            if offset != self._next_offset():
                self._world, self._begins_at = None, offset
                self._before.clear()
            if self._world is None:
                self._before.append((offset, time_ms, raw))
                self._try_to_begin(offset, raw)
            else:
                self._world.apply(offset, time_ms, raw)
                self._records += 1

    def compare(self) -> Verified:
        """Compare the world with the one that the snapshot states."""
        last, world = self._last, self._world
        if last is None:
            return Verified(
                self._place, Result.NO_SNAPSHOT, None, self._records, None, None
            )
        digest = _spell(last.restore(self._place))
        if world is None or world.next_offset != last.as_of + 1:
            result, folded = Result.UNKNOWN, None
        else:
            folded = _spell(world)
            is_same = folded == digest and (world.now_ms, world.partitions) == (
                last.time_ms,
                last.partitions,
            )
            result = Result.SAME if is_same else Result.DIFFERS
        return Verified(self._place, result, last.as_of, self._records, digest, folded)

    def _next_offset(self) -> int:
        if self._world is not None:
            return self._world.next_offset
        return self._before[-1][0] + 1 if self._before else self._begins_at

    def _try_to_begin(self, offset: int, raw: bytes | None) -> None:
        """Begin with the world of an older snapshot, once that is complete."""
        if raw is None or b'"Snapshot"' not in raw:
            return
        found = self._collector.read(offset, self._partitions, raw)
        if found is None or found.as_of + 1 < self._begins_at:
            return
        world = found.restore(self._place)
        for offset, time_ms, value in self._before:
            if offset > found.as_of:
                world.apply(offset, time_ms, value)
                self._records += 1
        self._world = world
        self._before.clear()


def _spell(world: World) -> str:
    return world.spell()[2]
