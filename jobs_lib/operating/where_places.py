"""Judge the places that a change of one key passes: which one it has not passed yet."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from jobs_lib.consuming.record import read_version
from jobs_lib.kafka.newest import Newest
from jobs_lib.kafka.timestamps import read_timestamp
from jobs_lib.operating.where_facts import COUNTED, OutboxRows, SourceRow, Unknown

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from jobs_lib.consuming.keys import KnownKey
    from jobs_lib.operating.where_facts import Owner, Reader

State: TypeAlias = Literal["passed", "under way", "stuck", "not there", "unknown"]
_RESYNC = "`jobs-lib readmodel resync` repairs it"
_REPLACED = (
    "its offset is of an earlier topic of this name: a service that runs reads a read "
    "model anew, and any other consumer stops until its offset is set"
)
_LOOK = "--seconds 60 looks further"


@dataclass(frozen=True, slots=True)
class Place:
    """One place that a change passes."""

    place: str
    """Such as ``table aircraft``, ``outbox``, or ``consumer board``."""
    state: State
    version: int | None
    """The newest version that the place has; None if it has none, or nothing."""
    since: datetime | None
    """Since when it is so; None if that is not known."""
    why: str
    """What the change waits for here, or what the place has of it."""


class Verdict(NamedTuple):
    """Whether the change has arrived everywhere, and the first place where not."""

    has_arrived: bool
    text: str


class Seen(NamedTuple):
    """The newest record of the key."""

    offset: int
    at: datetime
    version: int | None
    is_tombstone: bool


@dataclass
class Facts:
    """What was read of all places; what could not be read is `Unknown`."""

    topic: str
    key: str
    sources: dict[str, SourceRow | Unknown] = field(default_factory=dict)
    """By table."""
    outbox: OutboxRows | Unknown | None = None
    """None where the app only reads the topic."""
    newest: Newest | Unknown = field(default_factory=lambda: Unknown("not read"))
    consumers: list[tuple[str, str | None]] = field(default_factory=list)
    """The group of each, and the table of a read model."""
    readers: list[Reader] | Unknown = field(default_factory=list)

    @property
    def seen(self) -> Seen | None:
        """The newest record; None if none was found."""
        if isinstance(self.newest, Unknown) or self.newest.message is None:
            return None
        message = self.newest.message
        return Seen(
            message.offset() or 0,
            read_timestamp(message),
            read_version(message),
            message.value() is None,
        )

    @property
    def offset(self) -> int | None:
        """The offset of the newest record; None if none was found."""
        return self.seen and self.seen.offset

    @property
    def is_absent(self) -> bool:
        """Whether the whole partition was read, and has no record of the key."""
        newest = self.newest
        return (
            isinstance(newest, Newest)
            and newest.message is None
            and newest.looked_from <= newest.start
        )

    @property
    def is_hidden(self) -> bool:
        """Whether an open transaction hides what was written since it began."""
        newest = self.newest
        return isinstance(newest, Newest) and newest.end < newest.written

    @property
    def waits(self) -> bool:
        """Whether rows of the key are in the outbox, as far as is known."""
        rows = self.outbox
        return isinstance(rows, OutboxRows) and bool(
            rows.live or rows.batch or rows.held
        )


def judge(facts: Facts) -> tuple[list[Place], Verdict]:
    """Judge all places, in the order in which a change passes them."""
    readers = [*_judge_readers(facts)]
    places = [_judge_source(facts, *one, readers) for one in facts.sources.items()]
    if facts.outbox is not None:
        places.append(_judge_outbox(facts, facts.outbox))
    places.append(_judge_topic(facts, readers))
    places += readers
    return places, _find_verdict(facts, places)


def _find_verdict(facts: Facts, places: list[Place]) -> Verdict:
    for place in places:
        if place.state in ("stuck", "under way"):
            return _deny(f"It is {place.state} at the {place.place}: {place.why}")
    for place in places:
        if place.state == "unknown":
            return _deny(f"What the {place.place} has is not known: {place.why}")
    if facts.is_absent:
        return _deny(
            f"No place has a record of the key {facts.key!r}: is it so written?"
        )
    seen = facts.seen
    if seen is not None and seen.is_tombstone:
        return Verdict(True, "It has arrived everywhere: the entity was removed.")
    version = seen and seen.version
    told = f" with version {version}" if version is not None else ""
    return Verdict(True, f"It has arrived everywhere{told}.")


def _deny(text: str) -> Verdict:
    return Verdict(False, text if text.endswith((".", "?")) else f"{text}.")


# The table


def _judge_source(
    facts: Facts, table: str, row: SourceRow | Unknown, readers: list[Place]
) -> Place:
    name = f"table {table}"
    if isinstance(row, Unknown):
        return Place(name, "unknown", None, None, row.reason)
    loss = _find_loss(facts, row, readers)
    if loss is not None and not facts.is_hidden:
        return Place(name, "stuck", row.version, None, loss)
    if row.is_there:
        return Place(name, "passed", row.version, None, "has the row")
    return Place(name, "not there", None, None, "has no such row")


def _find_loss(facts: Facts, row: SourceRow, readers: list[Place]) -> str | None:
    """Why the row's last change was never sent; None if it was, as far as is known."""
    if facts.waits or not isinstance(facts.outbox, OutboxRows):
        return None
    seen, sent = facts.seen, _find_sent(facts, readers)
    if row.is_there and facts.is_absent:
        lost = "no record of the row was ever sent"
    elif row.is_there and _is_older(sent, row.version):
        lost = f"version {row.version} was not sent, only {sent}"
    elif not row.is_there and seen is not None and not seen.is_tombstone:
        lost = "the row is gone, and no tombstone was sent"
    else:
        return None
    return f"{lost}. {_tell_capture(row)}"


def _find_sent(facts: Facts, readers: list[Place]) -> int | None:
    """The version that was sent last, as topic and read models show it."""
    if facts.seen is not None:
        return facts.seen.version
    versions = [one.version for one in readers if one.state == "passed"]
    return max((one for one in versions if one is not None), default=None)


def _tell_capture(row: SourceRow) -> str:
    if row.is_captured is None:
        return (
            "No trigger of `capture_changes` sends its changes: does every writer call "
            "`send_current`? A re-export sends the state"
        )
    if not row.is_captured:
        return (
            f"Its trigger is switched off: `alter table {row.table} enable trigger "
            "jobs_lib_capture`, and a re-export sends what is missing"
        )
    return "Its trigger was off then, or the topic was made anew: a re-export sends it"


# The outbox


def _judge_outbox(facts: Facts, rows: OutboxRows | Unknown) -> Place:
    if isinstance(rows, Unknown):
        return Place("outbox", "unknown", None, None, rows.reason)
    if rows.held:
        return _judge_held(facts, rows)
    if not rows.live + rows.batch:
        # More rows of re-exports than were looked at may have one of the key.
        more = rows.batch_looked >= COUNTED
        told = f", nor among the next {COUNTED:,} of re-exports" if more else ""
        return Place("outbox", "passed", None, None, f"no row of the key waits{told}")
    since = rows.oldest if rows.live else rows.batch_oldest
    shard = f"shard/{rows.shard}"
    told = f"{_count(rows.live, 'row')} of the key; "
    if not rows.live:
        told = "a row of a re-export; "
    if rows.is_paused and not rows.live:
        why = f"{told}it is paused: `jobs-lib reexport resume` goes on with it"
        return Place("outbox", "stuck", rows.version, since, why)
    if (fault := _find_fault(rows.owner, shard, "`jobs-lib relay`")) is not None:
        return Place("outbox", "stuck", rows.version, since, told + fault)
    before = f"{_count(rows.before, 'row')} of {shard} before; "
    why = f"{told}{before}{rows.owner.pod} sends them"
    return Place("outbox", "under way", rows.version, since, why)


def _judge_held(facts: Facts, rows: OutboxRows) -> Place:
    key = "" if rows.holds_topic else f" --key {shlex.quote(facts.key)}"
    held = "the whole topic is held" if rows.holds_topic else "held"
    error = rows.error or "the hold is lifted just now"
    why = (
        f"{_count(rows.held, 'row')} {held}: {error}. When the cause is repaired, "
        f"`jobs-lib outbox retry --topic {facts.topic}{key}` tries at once; `jobs-lib "
        f"outbox show {rows.held_id}` shows the first"
    )
    since = rows.held_since or rows.held_oldest
    return Place("outbox", "stuck", rows.held_version, since, why)


# The topic


def _judge_topic(facts: Facts, readers: list[Place]) -> Place:
    newest, seen = facts.newest, facts.seen
    if isinstance(newest, Unknown):
        state: State = "stuck" if newest.is_missing else "unknown"
        return Place(f"topic {facts.topic}", state, None, None, newest.reason)
    name = f"topic {facts.topic}/{newest.partition}"
    rows = [one for one in facts.sources.values() if isinstance(one, SourceRow)]
    if facts.is_hidden and any(_find_loss(facts, one, readers) for one in rows):
        why = (
            f"a transaction is open from offset {newest.end} on, and hides what "
            "follows: it ends with its producer, or Kafka's `kafka-transactions.sh "
            "abort` ends it"
        )
        return Place(name, "stuck", seen and seen.version, None, why)
    if seen is not None:
        kind = "tombstone" if seen.is_tombstone else "record"
        why = f"has a {kind} at offset {seen.offset}"
        return Place(name, "passed", seen.version, seen.at, why)
    if facts.is_absent:
        return Place(name, "not there", None, None, "has no record of the key")
    why = f"not among the records from offset {newest.looked_from} on"
    if _all_have_it(facts, readers):
        told = "; the consumers have all before"
        return Place(name, "passed", None, None, f"{why}{told}")
    return Place(name, "unknown", None, None, f"{why}; {_LOOK}")


def _all_have_it(facts: Facts, readers: list[Place]) -> bool:
    """Whether the consumers have the newest record, though it was not found.

    They have read all that lies before. Whether the last version of a row was sent,
    only another version tells.
    """
    rows = [one for one in facts.sources.values() if isinstance(one, SourceRow)]
    if any(row.version is not None for row in rows) and (
        _find_sent(facts, readers) is None
    ):
        return False
    return bool(readers) and all(one.state == "passed" for one in readers)


# The consumers


def _judge_readers(facts: Facts) -> Iterable[Place]:
    if isinstance(facts.readers, Unknown):
        for group, table in facts.consumers:
            name = _name_reader(group, table)
            yield Place(name, "unknown", None, None, facts.readers.reason)
        return
    for reader in facts.readers:
        yield _judge_reader(facts, reader)


def _name_reader(group: str, table: str | None) -> str:
    return f"consumer {group}" if table is None else f"read model {table} of {group}"


def _judge_reader(facts: Facts, reader: Reader) -> Place:
    name = _name_reader(reader.group, reader.table)
    version = None if isinstance(reader.known, Unknown) else reader.known.version
    told = _judge_reading(facts, reader)
    return Place(name, told.state, version, told.since, told.why)


class _Told(NamedTuple):
    """The parts of a consumer's place."""

    state: State
    why: str
    since: datetime | None = None


def _judge_reading(facts: Facts, reader: Reader) -> _Told:
    newest, seen = facts.newest, facts.seen
    if isinstance(newest, Unknown):
        return _Told("unknown", "how far it has to read is not known")
    if facts.is_absent:
        return _Told("not there", "the topic has no record for it")
    if reader.is_of_other_topic:
        return _Told("stuck", _REPLACED)
    # All records of the key lie before this offset.
    end = newest.looked_from if seen is None else seen.offset + 1
    at = newest.start if reader.next_offset is None else reader.next_offset
    if at < end:
        origin = f"{facts.topic}/{newest.partition}"
        return _judge_distance(reader, origin, end - at, seen and seen.at)
    if reader.skip_error is not None:
        why = (
            f"has skipped it: {reader.skip_error}. When the cause is repaired, "
            "`jobs-lib readmodel replay` applies it"
        )
        return _Told("stuck", why, reader.skipped_at)
    if reader.table is None:
        return _Told("passed", "has handled it")
    return _judge_model(seen, reader.known)


def _judge_distance(
    reader: Reader, origin: str, left: int, since: datetime | None
) -> _Told:
    fault = _find_fault(reader.owner, origin, "`jobs-lib run`")
    if reader.failed_offset is not None:
        also = f". Also, {fault}" if fault else ""
        why = f"stands still at offset {reader.failed_offset}: {reader.failure}{also}"
        return _Told("stuck", why, reader.failing_since)
    told = f"up to {_count(left, 'record')} behind; "
    if fault is not None:
        return _Told("stuck", told + fault, since)
    return _Told("under way", f"{told}{reader.owner.pod} reads them", since)


def _judge_model(seen: Seen | None, known: KnownKey | Unknown) -> _Told:
    """Judge a read model that has read the newest record."""
    if isinstance(known, Unknown):
        return _Told("unknown", known.reason)
    if seen is None:
        return _Told("passed", "has the row" if known.has_row else "has no row")
    is_older = _is_older(known.version, seen.version)
    if seen.is_tombstone:
        # A newer state, whose record came after the topic was read, has a row again.
        if not known.has_row or _is_older(seen.version, known.version):
            return _Told("passed", "the row was removed", known.noted_at)
        return _Told("stuck", f"still has the row after its tombstone; {_RESYNC}")
    if known.has_row:
        if is_older:
            why = f"has read version {seen.version}, and the row is older; {_RESYNC}"
            return _Told("stuck", why)
        return _Told("passed", "has it")
    if known.has_ended and not is_older:
        return _Told("passed", "its function has left the row out", known.noted_at)
    return _Told("stuck", f"has read the record, and the row is missing; {_RESYNC}")


def _find_fault(owner: Owner, origin: str, command: str) -> str | None:
    """Why nobody works on an origin; None if a living process owns it."""
    if owner.pod is None:
        return f"no process owns {origin}. Does {command} run?"
    if not owner.is_alive:
        return (
            f"{owner.pod} owns {origin} and has given no sign since "
            f"{owner.heartbeat:%Y-%m-%d %H:%M:%S}"
        )
    return None


def _is_older(one: int | None, other: int | None) -> bool:
    """Whether both have versions, and the first is older."""
    return one is not None and other is not None and one < other


def _count(number: int, what: str) -> str:
    # Where the server counts, it stops there.
    many = f"{number:,} or more" if number == COUNTED else f"{number:,}"
    return f"{many} {what}" + ("" if number == 1 else "s")
