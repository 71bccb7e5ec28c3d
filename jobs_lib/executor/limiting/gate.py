"""The gate of job types: no job starts before other groups have handled its record.

The types of one section wait for the same groups. Claims leave out the jobs whose gate
is closed, by the ends that are known here, and the worker asks once more just before a
job starts. So an answer that has become too old also holds what was claimed already,
and so does a group that is set back.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs_lib import telemetry
from jobs_lib.errors import StoredPayloadError
from jobs_lib.jobs.waiting import Source, find_fault
from jobs_lib.kafka.dependencies import (
    REFRESHES,
    Place,
    choose_wait,
    find_end,
    find_wait,
)
from jobs_lib.ownership.lease import NotBegun

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from jobs_lib.executor.lane import ClaimedJob
    from jobs_lib.jobs.waiting import ExplainCircle
    from jobs_lib.kafka.dependencies import Answers, Dependency, Wait
    from jobs_lib.kafka.positions import Positions

    Ends = Mapping[str, Mapping[int, int]]
    """Up to which offset all groups have handled each partition, by topic."""

LOOK_SECONDS = 0.5
"""Seconds after which Kafka is asked anew where a round of questions has failed."""
_TELL_SECONDS = 5.0
"""How long jobs of a partition may wait before an event reports it."""
_SEEN_SECONDS = 60.0
"""How long it counts that a job was seen to wait: it may have been cancelled since."""
_TELL_PAUSE = 10.0
"""Seconds between two events of closed gates."""
NO_GATE = 2**63 - 1
"""Up to where it is open if there is none."""
_NOWHERE = Source("", "", 0)
"""Stands for a number that no partition has."""


class GateClosed(NotBegun):
    """The gate of a claimed job has closed again before the job began."""


class _Known(NamedTuple):
    ends: Mapping[int, int]
    """By partition of one topic."""
    until: float
    """When they are too old, by ``time.monotonic()``."""


class _Passed(NamedTuple):
    """Where claims have passed over jobs."""

    origin: str
    number: int
    """Of the partition that they come from."""


@dataclass(slots=True)
class _Waiting:
    """The jobs that claims have passed over at one place."""

    first: int
    """The offset of the first one that was met, as long as its gate is closed."""
    since: float
    """When that was, by ``time.monotonic()``."""
    highest: int
    """The highest offset of their records."""
    highest_since: float
    seen_at: float
    """When one of them was seen last."""


class JobWait(NamedTuple):
    """A partition of whose records jobs wait for other groups."""

    origin: str
    """The partition, as ``topic/number``."""
    seconds: float
    """Since a claim has met one of these jobs, which has waited since."""
    wait: Wait
    """What the last of these jobs waits for: the group that is furthest behind."""


class JobGate:
    """What the jobs of one section wait for; used by many threads."""

    def __init__(
        self, types: Iterable[str], after: Iterable[Dependency], positions: Positions,
        refresh: float, explain_circle: ExplainCircle | None = None,
    ) -> None:  # fmt: skip
        """Wait for the first answer of Kafka.

        Args:
            types: the types of the section.
            after: the groups that its jobs wait for.
            positions: says how far these groups are, every ``refresh`` seconds.
            refresh: seconds between two answers.
            explain_circle: knows which jobs would wait for themselves.
        """
        self.after = tuple(after)
        self.sources: Mapping[int, Source] = {}
        """The partitions that jobs come from, by their numbers in the database."""
        self.missing: set[int] = set()
        """Numbers that jobs have, and that are not known yet."""
        self.is_loaded = False
        """Whether these partitions were ever read."""
        self.wakes: list[Callable[[], None]] = []
        """Called when a gate has moved."""
        self.types = sorted(types)
        self._by_topic: dict[str, list[Dependency]] = {}
        for one in self.after:
            self._by_topic.setdefault(one.topic, []).append(one)
        self._positions = positions
        self._refresh = refresh
        self._explain_circle = explain_circle
        # All times of a gate are by ``time.monotonic()``.
        self._known: dict[str, _Known] = {}
        """Up to where the gates are open, by topic; replaced as a whole."""
        self._asked_at = 0.0
        """When Kafka's answers were asked for last."""
        self._lock = threading.Lock()
        """Guards the sources, and what waits and was told."""
        self._waiting: dict[_Passed, _Waiting] = {}
        self._looked_at = 0.0
        """When it was last looked for jobs that wait for long."""
        self._told: set[str] = set()
        """The partitions of the last event that still have such jobs."""
        self._told_at = -_TELL_PAUSE
        """When that event was sent."""
        self._closed_at: float | None = None
        """Since when the first such job has waited; None while there is none."""
        positions.listen(self._judge)

    # What is known of the groups

    def _ask(self) -> Answers:
        self._asked_at = time.monotonic()
        within = REFRESHES * self._refresh
        return {
            one: self._positions.ask_handled(one.group, one.topic, within=within)
            for one in self.after
        }

    def _judge(self) -> None:
        """Note an answer of Kafka. To ask is the question for the next one."""
        answers = self._ask()
        known: dict[str, _Known] = {}
        for topic, after in self._by_topic.items():
            found = [answer for one in after if (answer := answers[one]) is not None]
            if len(found) < len(after):
                continue
            count = min(answer.partitions for answer in found)
            ends: Mapping[int, int] = {
                number: find_end(after, answers, number) for number in range(count)
            }
            until = min(answer.read_at for answer in found) + REFRESHES * self._refresh
            before = self._known.get(topic)
            # The same object says that nothing has moved.
            if before is not None and before.ends == ends:
                ends = before.ends
            known[topic] = _Known(ends, until)
        before_all = {topic: one.ends for topic, one in self._known.items()}
        self._known = known
        if any(before_all.get(topic) is not one.ends for topic, one in known.items()):
            for wake in self.wakes:
                wake()

    def find_ends(self) -> Ends:
        """Find up to where the gates are open; what is not known is left out.

        Dispatchers call it again and again, also when idle. It asks Kafka anew where a
        round of questions has failed.
        """
        now = time.monotonic()
        if now >= self._asked_at + max(LOOK_SECONDS, self._refresh):
            self._ask()
        return {
            topic: one.ends for topic, one in self._known.items() if now < one.until
        }

    def find_end(self, source: Source, ends: Ends) -> int:
        """Find up to which offset a partition's gate is open.

        Where there is none, the worker says what is wrong.
        """
        if self._find_fault(source) is not None:
            return NO_GATE
        return ends.get(source.topic, {}).get(source.partition, 0)

    # Before a job starts

    def guard(
        self, function: Callable[..., Any], *, is_async: bool
    ) -> Callable[..., Any]:
        """Wrap a handler so that it is called only while the job's gate is open."""

        @wraps(function)
        def guarded(job: ClaimedJob, /, **values: Any) -> Any:
            self._ensure_open(job)
            return function(job, **values)

        @wraps(function)
        async def guarded_async(job: ClaimedJob, /, **values: Any) -> Any:
            self._ensure_open(job)
            return await function(job, **values)

        return guarded_async if is_async else guarded

    def _ensure_open(self, job: ClaimedJob) -> None:
        number, _, offset = job.record.partition(":")
        source: Source | None = None
        if number:
            source = self.sources.get(int(number))
            if source is None:
                self.missing.add(int(number))
                raise GateClosed(f"nothing is known of partition {number} yet")
        fault = self._find_fault(None if source is _NOWHERE else source)
        if fault is not None or source is None:
            raise StoredPayloadError(
                f"job {job.id} of {job.type!r} cannot wait for other groups, since "
                f"{fault}. Cancel it and enqueue another one while such a record is "
                "handled, or deploy a release whose `after` fits"
            )
        known = self._known.get(source.topic)
        is_known = known is not None and time.monotonic() < known.until
        if not is_known or int(offset) >= known.ends.get(source.partition, 0):  # type: ignore[union-attr]
            raise GateClosed(f"its gate closed at {source.topic}/{source.partition}")

    def _find_fault(self, source: Source | None) -> str | None:
        return find_fault(self.after, source, self._explain_circle)

    def note_sources(
        self, rows: Iterable[tuple[int, str, str, int]], asked: Iterable[int] = ()
    ) -> None:
        """Note the partitions that jobs come from.

        Args:
            rows: numbers, groups and partitions.
            asked: the numbers that were missing when the rows were asked for. Others
                may have come since, and be missing in the rows, too.
        """
        known = {
            number: Source(group, topic, partition)
            for number, group, topic, partition in rows
        }
        # Answers to several dispatchers may overtake one another.
        with self._lock:
            nowhere = dict.fromkeys(asked, _NOWHERE)
            self.sources = {**nowhere, **self.sources, **known}
            self.missing.difference_update(self.sources)
            self.is_loaded = True

    # What waits

    def note_waiting(self, origin: str, number: int, offset: int) -> None:
        """Note that a claim has passed over jobs, up to those of this offset.

        Args:
            origin: where the jobs lie.
            number: of the partition that they come from.
            offset: the highest one of their records.
        """
        place, now = _Passed(origin, number), time.monotonic()
        with self._lock:
            new = _Waiting(offset, now, offset, now, now)
            known = self._waiting.setdefault(place, new)
            known.seen_at = now
            if offset > known.highest:
                known.highest, known.highest_since = offset, now
        if number not in self.sources:
            self.missing.add(number)
            for wake in self.wakes:
                wake()

    def find_unsure(self, origins: Collection[str]) -> set[int]:
        """Find partitions of whose records no job was seen in these origins for long.

        Claims tell that they pass over a job, and not that it was cancelled since.

        Args:
            origins: where the jobs lie.
        """
        until = time.monotonic() - _SEEN_SECONDS
        with self._lock:
            return {
                place.number
                for place, known in self._waiting.items()
                if known.seen_at <= until and place.origin in origins
            }

    def note_looked(
        self, origins: Collection[str], seen: Mapping[int, bool], began: float
    ) -> None:
        """Note of partitions whether jobs of their records still wait in these origins.

        Args:
            origins: where it was looked.
            seen: whether there was a job, by the number of the partition.
            began: before it was looked. What claims have met since still waits.
        """
        now = time.monotonic()
        with self._lock:
            for place, known in [*self._waiting.items()]:
                if place.origin not in origins or place.number not in seen:
                    continue
                if seen[place.number]:
                    known.seen_at = now
                elif known.seen_at < began:
                    del self._waiting[place]

    def release(self, origins: Collection[str]) -> None:
        """Forget the jobs of origins: another process tells that they wait."""
        with self._lock:
            self._waiting = {
                place: known
                for place, known in self._waiting.items()
                if place.origin not in origins
            }

    def find_waits(self) -> list[JobWait]:
        """Find the partitions of whose records jobs wait, the longest first."""
        answers, now = self._ask(), time.monotonic()
        with self._lock:
            waits = [*self._find_waits(answers, now)]
        return sorted(waits, key=lambda one: -one.seconds)

    def _find_waits(self, answers: Answers, now: float) -> Iterator[JobWait]:
        of_number: dict[int, list[_Passed]] = {}
        for place in self._waiting:
            of_number.setdefault(place.number, []).append(place)
        for number, places in of_number.items():
            source = self.sources.get(number)
            if source is None:
                continue
            after = self._by_topic.get(source.topic, ())
            end = find_end(after, answers, source.partition) if after else NO_GATE
            known = [self._waiting[one] for one in places if self._waits(one, end)]
            highest = max((one.highest for one in known), default=0)
            lacks = (
                find_wait(one, answers[one], Place(source.partition, highest))
                for one in after
            )
            if known and (wait := choose_wait(lacks)) is not None:
                since = min(one.since for one in known)
                yield JobWait(f"{source.topic}/{source.partition}", now - since, wait)

    def _waits(self, place: _Passed, end: int) -> bool:
        """Whether jobs of a place wait for a gate that is open up to this offset.

        Forgets those that do not. Once the first one may start, only of the highest one
        it is known since when it waits.
        """
        known = self._waiting[place]
        if known.highest < end:
            del self._waiting[place]
            return False
        if known.first < end:
            known.first, known.since = known.highest, known.highest_since
        return True

    def look(self) -> None:
        """Tell of partitions of whose records jobs wait for long."""
        now = time.monotonic()
        with self._lock:
            if now < self._looked_at + LOOK_SECONDS:
                return
            self._looked_at = now
        waits = [one for one in self.find_waits() if one.seconds > _TELL_SECONDS]
        origins = {one.origin for one in waits}
        with self._lock:
            events = [*self._find_events(waits, origins, now)]
        for event, fields in events:
            telemetry.emit(event, types=self.types, **fields)

    def _find_events(
        self, waits: list[JobWait], origins: set[str], now: float
    ) -> Iterator[tuple[str, dict[str, object]]]:
        """Find what is to be told: one event for all partitions."""
        self._told &= origins
        if self._closed_at is not None and not self._told:
            yield "jobs.waited", {"seconds": round(now - self._closed_at, 1)}
            self._closed_at = None
        if origins <= self._told or now < self._told_at + _TELL_PAUSE:
            return
        longest = waits[0]
        if self._closed_at is None:
            self._closed_at = now - longest.seconds
        self._told, self._told_at = origins, now
        yield (
            "jobs.waiting",
            {
                "count": len(waits),
                "origin": longest.origin,
                "after": longest.wait.dependency.group,
                "seconds": round(longest.seconds, 1),
                "reason": longest.wait.explain(),
            },
        )

    def report(self) -> dict[str, Any]:
        """Say what the types wait for, and whether Kafka says how far each group is."""
        known = self.find_ends()
        after = [[one.topic, one.group, one.topic in known] for one in self.after]
        return {"types": self.types, "after": after}
