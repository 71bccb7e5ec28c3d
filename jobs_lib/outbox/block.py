"""A block: rows of one shard, made into records that are ready to be sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

LIVE, BATCH = 0, 1
"""The classes of rows: live ones leave before those of re-exports."""

Headers: TypeAlias = "list[tuple[str, str | bytes | None]]"
Row: TypeAlias = "tuple[int, int, bytes]"
"""(class, id, ctid) of a row of the outbox."""
LiveRow: TypeAlias = "tuple[Any, ...]"
"""(id, ctid, topic, key, value, headers, version, entity, time, held, size), as read.

The time is in UTC, in JSON; the size is that of a value that has not come with the row.
"""
BatchRow: TypeAlias = "tuple[Any, ...]"
"""(id, ctid, topic, key, entity, re-export, superseded, its state, held, time)."""
Message: TypeAlias = (
    "tuple[str, bytes | None, str | None, Headers | dict[str, str | bytes | None]]"
)
"""(topic, value, key, headers), as the producer takes them."""

ID, PLACE, TOPIC, VALUE, ENTITY, HELD, SIZE = map(itemgetter, (0, 1, 2, 4, 7, 9, 10))
"""Of a live row."""
KEY_OF_TOPIC = itemgetter(2, 3)


@dataclass(slots=True)
class OutboxRecord:
    """One record as the producer takes it, and the rows that it stands for.

    Its headers are made when they are asked for. A block has thousands of records, and
    what each of them keeps until it is sent the garbage collector goes through again
    and again.
    """

    topic: str
    key: str | None
    value: bytes | None = field(repr=False)
    row_class: int
    row_id: int
    """The newest of its rows."""
    place: bytes
    """Where that row lies: its ctid."""
    head: Headers
    """The headers that the topic's records share."""
    written_at: str
    """By ISO 8601, in UTC without a zone."""
    version: int | None = None
    more: Mapping[str, str] | None = field(default=None, repr=False)
    """The caller's own headers, which count where both have one."""
    entity: str | None = None
    """Whose state at this time is the value."""
    older: list[Row] | None = None
    """The rows before, whose states it stands for as well."""

    def supersede(self, older: OutboxRecord) -> None:
        """Stand for an older record of the key, too.

        An end without a version has that of the end before, and the one that follows
        that of a state; a state that is read for it when it leaves has its own.
        """
        self.older = older.older or []
        self.older.append(older.row)
        if self.value is None and self.version is None and older.version is not None:
            self.version = older.version + (older.value is not None)

    @property
    def row(self) -> Row:
        """The newest of its rows."""
        return self.row_class, self.row_id, self.place

    @property
    def rows(self) -> list[Row]:
        """Its rows, in their order."""
        return [*(self.older or ()), self.row]

    def make_headers(self) -> Headers:
        """All of its headers."""
        headers: Headers = [
            ("ce_id", f"{self.row_id}-{self.written_at}"),
            *self.head,
        ]
        if self.row_class == LIVE:
            headers.append(("ce_time", f"{self.written_at}Z"))
        if self.version is not None:
            headers.append(("ce_version", str(self.version)))
        return [*{**dict(headers), **self.more}.items()] if self.more else headers


class PlainRows:
    """Live rows each of which leaves as it lies: none is held, merged or loaded.

    Most blocks are of such, and a backlog is. They are sent without being made into
    records first, which would take Python a third of the time that it has for them.
    """

    def __init__(self, rows: Sequence[LiveRow], heads: Mapping[str, Headers]) -> None:
        """Take them as they were read.

        Args:
            rows: in the order of sending.
            heads: by topic, the headers that its records share.
        """
        self._rows = rows
        self._heads = heads

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def records(self) -> list[OutboxRecord]:
        """The same as records, for when one of them is not taken."""
        return [make_record(row, self._heads[TOPIC(row)]) for row in self._rows]

    @property
    def done(self) -> tuple[list[int], list[bytes]]:
        """The ids and places of all."""
        return [*map(ID, self._rows)], [*map(PLACE, self._rows)]

    def make_messages(self) -> Iterator[Message]:
        """What each of them is to the producer.

        The headers are those of its record, in one object that is filled anew each
        time: the producer copies them.
        """
        last, time, written_at = None, None, ""
        headers: dict[str, str | bytes | None] = {}
        for row_id, _, topic, key, value, more, version, _, at, _, _ in self._rows:
            if topic != last:
                last, time = topic, None
                headers = {"ce_id": None, **dict(self._heads[topic])}
            # Rows of one statement may have the same.
            if at != time:
                time, written_at = at, at[1:-1]
                headers["ce_time"] = f"{written_at}Z"
            # A server that has lost commits gives their ids once more.
            headers["ce_id"] = f"{row_id}-{written_at}"
            if version is not None:
                headers["ce_version"] = str(version)
            else:
                headers.pop("ce_version", None)
            yield topic, value, key, {**headers, **more} if more else headers


Records: TypeAlias = "list[OutboxRecord] | PlainRows"


def make_record(row: LiveRow, head: Headers) -> OutboxRecord:
    """The record of a row; ``head`` are the headers that it shares with others."""
    row_id, place, topic, key, value, more, version, entity, at, _, _ = row
    return OutboxRecord(
        topic,
        key,
        value,
        LIVE,
        row_id,
        place,
        head,
        # Without the quotes of JSON.
        at[1:-1],
        version,
        more,
        entity,
    )


def as_records(records: Records) -> list[OutboxRecord]:
    """Records, whatever they were."""
    return records.records if isinstance(records, PlainRows) else records


def make_messages(records: Records) -> Iterator[Message]:
    """What records are to the producer, one after the other."""
    if isinstance(records, PlainRows):
        return records.make_messages()
    return ((one.topic, one.value, one.key, one.make_headers()) for one in records)


class BatchRows:
    """Rows of re-exports, by what is to be done with them."""

    def __init__(self, rows: Iterable[BatchRow]) -> None:
        """Sort them as they were read."""
        self.reexports: set[int] = set()
        self.held: list[Row] = []
        self.dropped: list[Row] = []
        self.waiting: dict[int, list[BatchRow]] = {}
        """By their re-export: those that leave as its rate allows."""
        for row in rows:
            row_id, place, _, _, _, reexport_id, superseded, state, held, _ = row
            self.reexports.add(reexport_id)
            # Held ones as well: nobody waits for them.
            if superseded or state in (None, "cancelled"):
                self.dropped.append((BATCH, row_id, place))
            elif held:
                self.held.append((BATCH, row_id, place))
            else:
                self.waiting.setdefault(reexport_id, []).append(row)


class Hold(NamedTuple):
    """What keeps rows back: those of a key, one without a key, or a whole topic's."""

    topic: str
    key: str | None
    """None where it is one row, or the whole topic."""
    row_id: int | None
    """Of a row without a key."""
    error: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A record that is not taken."""

    record: OutboxRecord
    error: str
    whole_topic: bool = False
    """Whether no record of the topic would be taken now."""

    @property
    def hold(self) -> Hold:
        """What follows from it."""
        record = self.record
        if self.whole_topic:
            return Hold(record.topic, None, None, self.error)
        row_id = record.row_id if record.key is None else None
        return Hold(record.topic, record.key, row_id, self.error)


@dataclass(slots=True)
class Block:
    """What goes out in one Kafka transaction, and the rows that it empties."""

    outgoing: Records = field(default_factory=list)
    """The records, or rows of which none have been made."""
    dropped: list[Row] = field(default_factory=list)
    """Rows that are done without a record."""
    refusals: list[Refusal] = field(default_factory=list)
    """Records that are not to be sent."""
    behind: list[Row] = field(default_factory=list)
    """Rows that wait behind others."""
    reexports: set[int] = field(default_factory=set)
    """The re-exports that rows of the block belong to: these may be their last ones."""
    shard: int = 0
    """Whose rows these are."""
    retried: bool = False
    """Whether it is one row that is held, and tried again."""

    @property
    def records(self) -> list[OutboxRecord]:
        """The records; plain rows are made into them when somebody asks."""
        self.outgoing = as_records(self.outgoing)
        return self.outgoing

    @property
    def done(self) -> tuple[list[int], list[bytes]]:
        """Ids and places of every row that is done once the records are in Kafka."""
        if isinstance(self.outgoing, PlainRows):
            ids, places = self.outgoing.done
            merged = []
        else:
            ids = [record.row_id for record in self.outgoing]
            places = [record.place for record in self.outgoing]
            merged = [record.older for record in self.outgoing if record.older]
        for rows in (*merged, self.dropped):
            ids += [row_id for _, row_id, _ in rows]
            places += [place for _, _, place in rows]
        return ids, places

    def __bool__(self) -> bool:
        return bool(self.outgoing or self.dropped or self.refusals or self.behind)

    def keep(self, sent: Records, refusals: Sequence[Refusal]) -> None:
        """Keep these records; the others are refused, or wait behind those that are."""
        if not refusals:
            return
        kept = as_records(sent)
        known = {id(one) for one in kept} | {id(one.record) for one in refusals}
        for record in self.records:
            if id(record) not in known:
                self.behind += record.rows
        self.outgoing = kept
        self.refusals += refusals


class KeptBack:
    """What must not be sent now: refused records, and what waits behind them.

    A block may have thousands of either, so no record is compared with each refusal.
    """

    def __init__(self, refusals: Iterable[Refusal] = ()) -> None:
        """Begin with these refusals."""
        self._records: set[int] = set()
        self._keys: set[tuple[str, str]] = set()
        self._topics: set[str] = set()
        for refusal in refusals:
            self.add(refusal)

    def add(self, refusal: Refusal) -> None:
        """Keep back one more record, and the others of its key or of its topic."""
        record = refusal.record
        self._records.add(id(record))
        if refusal.whole_topic:
            self._topics.add(record.topic)
        elif record.key is not None:
            self._keys.add((record.topic, record.key))

    def __contains__(self, record: OutboxRecord) -> bool:
        return (
            record.topic in self._topics
            or (record.topic, record.key) in self._keys
            or id(record) in self._records
        )


def others(
    records: Iterable[OutboxRecord], refusals: Sequence[Refusal]
) -> list[OutboxRecord]:
    """The records that none of the refused ones keeps back; nor those themselves."""
    back = KeptBack(refusals)
    return [record for record in records if record not in back]
