"""Insert jobs in the caller's transaction: the statements to send, and their order."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from jobs_lib.callers import CopyIn, Fetch, Statements
from jobs_lib.errors import PlaceError, TopicError
from jobs_lib.jobs.copy_lines import OwnPlace, copy_blocks, copy_prefix, copy_suffix
from jobs_lib.jobs.options import PRIORITIES
from jobs_lib.jobs.waiting import Source, find_fault
from jobs_lib.partitioner import choose_origin
from jobs_lib.postgres.hints import EVERYWHERE, Hints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from jobs_lib.callers import Steps
    from jobs_lib.jobs.options import Options
    from jobs_lib.jobs.waiting import ExplainCircle
    from jobs_lib.kafka.dependencies import Dependency
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.settings import Settings

_LOCKED_ONE_BY_ONE = 64
_INSERTED_AT_ONCE = 1_000
_LONGEST_RUN = 500
_KNOWN = 60.0
"""Seconds for which the topics are cached after they were read."""
_ORIGIN = re.compile(r"([a-zA-Z0-9._-]+)/(?:0|[1-9][0-9]{0,8})")
_cached_origin = lru_cache(maxsize=65_536)(choose_origin)


@dataclass(slots=True)
class Entry:
    """One checked job to insert."""

    payload: bytes = field(repr=False)
    group: str | None
    headers: str | None = field(repr=False)
    options: Options
    handled: str | None
    """The origin of the record that is handled now."""
    place: str | None
    """Whose places it gets; None if nobody tells how far its jobs are done."""
    after: tuple[Dependency, ...] = ()
    """The groups that its type waits for."""


@dataclass(slots=True)
class Entries:
    """Many checked jobs of one type to insert."""

    payloads: list[bytes] = field(repr=False)
    groups: Sequence[str | None] | None
    """The group of each; None if no job has one."""
    headers: str | None = field(repr=False)
    options: Options
    handled: str | None
    place: str | None
    after: tuple[Dependency, ...] = ()


@dataclass(slots=True)
class _Home:
    topic: str
    partitions: int
    declared: frozenset[str]

    def origin_of(self, group: str) -> str:
        return _cached_origin(group, self.topic, self.partitions)


class Enqueuer:
    """Knows how to write jobs into one schema; runs no statement itself."""

    def __init__(
        self,
        queries: Callable[[], Queries],
        settings: Callable[[], Settings],
        explain_circle: ExplainCircle | None = None,
    ) -> None:
        self._statements = Statements(queries)
        self._settings = settings
        self._explain_circle = explain_circle
        self._hints = Hints()
        self._home: _Home | None = None
        self._read_at = 0.0
        self._sources: dict[str, Source] = {}
        """The partitions of records, by their numbers."""
        self.checks_places = True
        """Whether jobs are refused that a gate could not judge."""

    @property
    def payload_limit(self) -> int:
        """Bytes that a payload may have."""
        return self._settings().payload_limit

    def enqueue(self, entry: Entry) -> Steps[int]:
        """Insert one job; returns its id, or that of the job with its unique key."""
        if entry.after:
            yield from self._check_place(entry)
        home = self._known_home() or (yield from self._read_home())
        options = entry.options
        origin = self._given_origin(home, options.origin)
        counted = None
        if origin is None:
            if entry.group is not None:
                origin = home.origin_of(entry.group)
                counted = str(home.partitions)
            else:
                origin = entry.handled or (
                    f"{home.topic}/{random.randrange(home.partitions)}"
                )
        hint = None
        if self._settings().notify:
            hint = self._hints.choose(origin)
        parameters: dict[str, str | bytes | None] = {
            "origin": origin,
            "type": options.type,
            "group": entry.group,
            "payload": entry.payload.decode(),
            "run_at": options.run_at_text,
            "delay": options.delay_text,
            "priority": str(PRIORITIES[options.priority]),
            "headers": entry.headers,
            "unique_key": options.unique,
            "ordered": "t" if options.ordered else "f",
            "hint": hint,
            # If the number has changed meanwhile, the SQL function moves the job.
            "partitions": counted,
            "place": entry.place,
        }
        rows = yield Fetch(self._statements["enqueue"], parameters)
        return int(rows[0][0])

    def enqueue_many(self, entries: Entries) -> Steps[int]:
        """Insert many jobs in the order given; returns how many."""
        if entries.after:
            yield from self._check_place(entries)
        home = self._known_home() or (yield from self._read_home())
        options = entries.options
        given = self._given_origin(home, options.origin)
        origin_of: dict[str | None, str] = {}
        if entries.groups is not None:
            held = yield Fetch(self._statements["hold_home"], {})
            topic, partitions = held[0]
            if (topic, int(partitions)) != (home.topic, home.partitions):
                home = yield from self._read_home()
            groups = dict.fromkeys(g for g in entries.groups if g is not None)
            origin_of.update(
                (group, given or home.origin_of(group)) for group in groups
            )
            if options.ordered and groups:
                yield self._lock(list(groups), origin_of)
        ungrouped = given or entries.handled

        def origins() -> Iterator[str]:
            """Yield the origin of each job; each call begins again."""
            free = _spread(home, len(entries.payloads), ungrouped)
            if entries.groups is None:
                return free
            return (
                origin_of[group] if group is not None else next(free)
                for group in entries.groups
            )

        def lines() -> Iterator[bytes]:
            groups = entries.groups or itertools.repeat(None)
            heads = map(copy_prefix(options.type), origins(), groups)
            suffix = copy_suffix(options, state, run_at, entries.headers, own)
            return copy_blocks(heads, entries.payloads, suffix)

        state, run_at = yield from self._find_time(options)
        own, has_more = yield from self._find_place(entries.place)
        yield CopyIn(
            self._statements.load_queries()["copy_placed_rows" if own else "copy_rows"],
            lines(),
            lambda: self._inserts(entries, state, run_at, origins(), own),
        )
        if own and has_more:
            parameters = {"place": entries.place} | own._asdict()
            yield Fetch(self._statements["keep_places_of"], parameters)
        if self._settings().notify and state == "available":
            yield Fetch(self._statements["hint"], {"hint": EVERYWHERE})
        return len(entries.payloads)

    def _check_place(self, new: Entry | Entries) -> Steps[None]:
        """Refuse jobs that wait for other groups, if no record says how far."""
        if not self.checks_places:
            return
        source = None
        if new.place is not None:
            source = yield from self._find_source(new.place)
        fault = find_fault(new.after, source, self._explain_circle)
        if fault is not None:
            raise PlaceError(
                f"a job of {new.options.type!r} starts only when other groups have "
                f"handled its record, and {fault}. Enqueue it while a record of such a "
                "topic is handled, or in a job that comes from one and is not done"
            )

    def _find_source(self, place: str) -> Steps[Source | None]:
        """Find which partition a new job comes from; asked once for each partition."""
        kind, number, *_ = place.split(" ")
        is_record = kind == "record"
        if is_record and number in self._sources:
            return self._sources[number]
        rows = yield Fetch(
            self._statements["find_place_source"],
            {
                "source": number if is_record else None,
                "place": None if is_record else place,
            },
        )
        if not rows:
            return None
        group, topic, partition = rows[0]
        source = Source(group, topic, int(partition))
        if is_record:
            self._sources[number] = source
        return source

    def _find_time(self, options: Options) -> Steps[tuple[str, str | None]]:
        """Find the state and time of new jobs by the database's clock.

        Jobs that are already due are available at once.
        """
        run_at, delay = options.run_at_text, options.delay_text
        if run_at is None and delay is None:
            return "available", None
        parameters = {"run_at": run_at, "delay": delay}
        ((due, at),) = yield Fetch(self._statements["find_time"], parameters)
        return "available" if due == "true" else "scheduled", at

    def _find_place(self, place: str | None) -> Steps[tuple[OwnPlace | None, bool]]:
        """Find the place for the rows of new jobs, and whether they have more."""
        if place is None:
            return None, False
        kind, *values = place.split(" ")
        if kind == "record":
            return OwnPlace(*values), False
        rows = yield Fetch(self._statements["places_of"], {"place": place})
        return (OwnPlace(*rows[0]) if rows else None), len(rows) > 1

    def _lock(self, groups: list[str], origin_of: dict[str | None, str]) -> Fetch:
        if len(groups) <= _LOCKED_ONE_BY_ONE:
            places = [(origin_of[group], group) for group in groups]
            return Fetch(
                self._statements["lock_groups"], {"places": json.dumps(places)}
            )
        origins = json.dumps(sorted(set(origin_of.values())))
        return Fetch(self._statements["lock_origins_of_groups"], {"origins": origins})

    def _inserts(
        self,
        entries: Entries,
        state: str,
        run_at: str | None,
        origins: Iterable[str],
        own: OwnPlace | None,
    ) -> Iterator[Fetch]:
        options = entries.options
        groups = entries.groups or itertools.repeat(None)
        rows = zip(origins, groups, entries.payloads, strict=False)
        same: dict[str, str | bytes | None] = {
            "type": options.type,
            "state": state,
            "run_at": run_at,
            "priority": str(PRIORITIES[options.priority]),
            "headers": entries.headers,
            "source": own and own.source,
            "record_offset": own and own.record_offset,
        }
        while some := list(itertools.islice(rows, _INSERTED_AT_ONCE)):
            text = ",".join(
                f"[{json.dumps(origin)},{json.dumps(group)},{payload.decode()}]"
                for origin, group, payload in some
            )
            yield Fetch(self._statements["insert_rows"], {**same, "rows": f"[{text}]"})

    def _given_origin(self, home: _Home, origin: str | None) -> str | None:
        if origin is None:
            return None
        found = _ORIGIN.fullmatch(origin)
        if not found or found[1] not in home.declared:
            raise TopicError(
                f"no topic is declared for the origin {origin!r}: give "
                "topic/partition, such as orders/7, with one of the topics "
                + ", ".join(sorted(home.declared))
            )
        return origin

    def _known_home(self) -> _Home | None:
        """The cached home topic; None if it must be read again."""
        return self._home if time.monotonic() - self._read_at < _KNOWN else None

    def _read_home(self) -> Steps[_Home]:
        rows = yield Fetch(self._statements["known_topics"], {})
        homes = [
            (topic, partitions) for topic, partitions, home in rows if home == "true"
        ]
        if not homes:
            raise TopicError(
                "no home topic is declared, so a job's origin cannot be computed: "
                "run `jobs-lib topics declare MODULE:APP TOPIC --partitions N --home`"
            )
        declared = frozenset(cast("str", row[0]) for row in rows)
        self._read_at = time.monotonic()
        self._home = _Home(homes[0][0], int(homes[0][1]), declared)
        return self._home


def _spread(home: _Home, count: int, origin: str | None) -> Iterator[str]:
    """Yield origins for jobs without a group, in runs that are close in the index."""
    if origin is not None:
        return itertools.repeat(origin)
    run = max(1, min(_LONGEST_RUN, count // home.partitions))
    first = random.randrange(home.partitions)
    return (
        f"{home.topic}/{(first + place // run) % home.partitions}"
        for place in itertools.count()
    )
