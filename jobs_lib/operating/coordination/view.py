"""See who holds what in a coordination log, how far it is, and whether it lives."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from jobs_lib.coordination.log import Log
from jobs_lib.coordination.messages import Probe, Shared
from jobs_lib.coordination.world import Outcome
from jobs_lib.coordination.writer import Sent, Writer
from jobs_lib.errors import AccessError
from jobs_lib.kafka.client import list_partitions
from jobs_lib.kafka.places import read_ends
from jobs_lib.operating.coordination.session import (
    ANSWER_SECONDS,
    INTERVAL,
    OPERATORS,
    as_time,
    name_operator,
)
from jobs_lib.partitioner import split_origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime

    from jobs_lib.coordination.world import Entry, World
    from jobs_lib.kafka.poller import Partition
    from jobs_lib.settings import Settings


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A partition that a group shares."""

    group: str
    topic: str
    partition: int
    position: int | None
    """The next offset; None while the log knows none."""
    lag: int | None
    """Offsets from there to the end; negative if the end lies before the position, and
    None if one of them is not known."""
    client: str | None
    """Who holds it."""
    instance: str | None
    """The holder's run: another one after each start."""
    claim: int | None
    """The offset in the log of the record by which it is held."""
    state: str
    """``fresh``, ``unknown`` or ``stale``, as the holder's last record is old; or
    ``free``."""
    silent: float | None
    """Seconds since that record."""


@dataclass(frozen=True, slots=True)
class GroupPause:
    """A pause of a group."""

    group: str
    until: datetime
    client: str
    """Who has paused it."""
    places: int
    """How many partitions of the log say so."""


@dataclass(frozen=True, slots=True)
class View:
    """All that a log says of its groups."""

    log: str
    time: datetime | None
    """That of the log, at which holders are judged; None while it has no record."""
    is_now: bool
    """Whether that is the brokers' time now. If not, it is that of the newest record: a
    holder that has died since seems to live."""
    parts: list[SharedPart]
    pauses: list[GroupPause]


class Viewer:
    """Reads a log, and shows it again and again. Use it as a context manager."""

    def __init__(self, settings: Settings, log: str, group: str | None = None) -> None:
        """Prepare; no connection is made yet.

        Args:
            settings: where Kafka is.
            log: the coordination log's name in Kafka.
            group: only this one; None for all.
        """
        self._settings = settings
        self._group = group
        sender = name_operator(settings, OPERATORS)
        # It reads a log that was cut as it is, and never writes a snapshot.
        self._log = Log(settings, log, sender, interval=INTERVAL, only_reads=True)
        self._writer: Writer | None = None

    def __enter__(self) -> Self:
        """Read the log to its end.

        Raises:
            AccessError: Kafka does not let this client in, or denies a right to read.
            ConfigurationError: the topic cannot be the log.
            UnavailableError: no broker answers, or the log cannot be read in time.
        """
        self._log.start()
        try:
            writer = Writer(
                self._settings, self._log.topic, ANSWER_SECONDS, _acknowledge, _give_up
            )
            # Without the right to write, all is shown as well as it is known.
            with suppress(AccessError):
                writer.start()
                self._writer = writer
        except BaseException:
            # Nobody calls `__exit__` then.
            self._log.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop to read."""
        try:
            if self._writer is not None:
                self._writer.stop(0)
        finally:
            self._log.stop()

    def look(self) -> View:
        """Show the log as it is now.

        Raises:
            UnavailableError: no broker answers, or the log cannot be read in time.
        """
        is_now = self._writer is not None
        if self._writer is not None:
            self._probe(self._writer)
        self._log.read_to_end()
        with self._log.lock:
            worlds = [world.copy() for world in self._log.get_worlds()]
        newest = max(world.now_ms for world in worlds)
        return View(
            self._log.topic,
            as_time(newest) if newest else None,
            is_now,
            self._list_parts(worlds, None if is_now else newest),
            list(self._list_pauses(worlds, newest)),
        )

    def _probe(self, writer: Writer) -> None:
        """Move the time of each place to now."""
        count = self._log.partitions
        sent = [Sent(Probe(self._log.sender)) for _ in range(count)]
        for place, one in enumerate(sent):
            writer.send(one, place, count, None)
        for one in sent:
            one.wait(ANSWER_SECONDS)

    def _list_parts(
        self, worlds: Iterable[World], newest_ms: int | None
    ) -> list[SharedPart]:
        """List all partitions of the topics that a group shares, by group.

        Args:
            worlds: those of all places.
            newest_ms: the time at which holders are judged; None for each place's.
        """
        found: dict[Shared, tuple[Entry, int]] = {}
        for world in worlds:
            for shared, entry in world.entries.items():
                if self._group in (None, shared.group_id):
                    found[shared] = entry, newest_ms or world.now_ms
        ends = _read_ends(self._settings, {one.topic for one in found})
        groups: dict[str, set[str]] = {}
        for one in found:
            groups.setdefault(one.topic, set()).add(one.group_id)
        # The log knows only of partitions that somebody has claimed once.
        unclaimed = {
            Shared(group, *part) for part in ends for group in groups[part[0]]
        } - found.keys()
        parts = [
            _describe(shared, entry, now_ms, ends.get(shared[1:]))
            for shared, (entry, now_ms) in found.items()
        ]
        parts += [_describe_unclaimed(one) for one in unclaimed]
        return sorted(parts, key=lambda one: (one.group, one.topic, one.partition))

    def _list_pauses(
        self, worlds: Iterable[World], now_ms: int
    ) -> Iterator[GroupPause]:
        found: dict[tuple[str, int, str], int] = {}
        for world in worlds:
            for group, (until_ms, client, _) in world.pauses.items():
                if now_ms < until_ms and self._group in (None, group):
                    key = group, until_ms, client
                    found[key] = found.get(key, 0) + 1
        for (group, until_ms, client), count in sorted(found.items()):
            yield GroupPause(group, as_time(until_ms), client, count)


def _describe(shared: Shared, entry: Entry, now_ms: int, end: int | None) -> SharedPart:
    position, holding = entry
    lag = None if position is None or end is None else end - position
    if holding is None:
        return SharedPart(*shared, position, lag, None, None, None, "free", None)
    return SharedPart(
        *shared,
        position,
        lag,
        holding.client_id,
        holding.instance_id,
        holding.claim,
        holding.find_freshness(now_ms).value,
        (now_ms - holding.last_ms) / 1000,
    )


def _describe_unclaimed(shared: Shared) -> SharedPart:
    return SharedPart(*shared, None, None, None, None, None, "free", None)


def _read_ends(settings: Settings, topics: set[str]) -> dict[Partition, int]:
    """Read the ends of topics; those that Kafka does not show are left out."""
    if not topics:
        return {}
    counts = list_partitions(settings, topics)
    names = [f"{topic}/{n}" for topic, count in counts.items() for n in range(count)]
    ends = read_ends(settings, names) if names else {}
    return {split_origin(name): end for name, end in ends.items()}


def _acknowledge(sent: Sent, place: int, offset: int) -> None:
    # Nobody reads it back: to read on to the end is enough.
    sent.end(Outcome.VALID)


def _give_up(sent: Sent, place: int, error: Exception) -> None:
    sent.end(None, error)
