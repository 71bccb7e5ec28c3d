"""A block: rows of one shard, made into records that are ready to send."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

BYTES = 8 * 2**20
"""Bytes of values in one block; a single larger value is a block of its own."""
LIVE, BATCH = 0, 1
"""The classes of rows: live ones leave before those of re-exports."""

Headers: TypeAlias = "list[tuple[str, str | bytes | None]]"
Row: TypeAlias = "tuple[int, int, bytes]"
"""(class, id, ctid) of a row of the outbox."""
LiveRow: TypeAlias = "tuple[Any, ...]"
"""(id, ctid, topic, key, value, headers, version, entity, time, held, size), as read.

The time is JSON, in UTC; the size is set if the value was not read with the row.
"""
BatchRow: TypeAlias = "tuple[Any, ...]"
"""(id, ctid, topic, key, entity, re-export, newer, its state, held, time, version,
cause, source), as read.

The state and the source are those of the re-export. ``newer`` tells whether a live row
that waits, or has left, is newer; None if there is none.
"""
Message: TypeAlias = (
    "tuple[str, bytes | None, str | None, Headers | dict[str, str | bytes | None]]"
)
"""(topic, value, key, headers): the arguments for the producer."""
Limited: TypeAlias = "tuple[OutboxRecord, tuple[Row, ...]]"
"""A record of a re-export, and earlier rows of its key that are dropped with it."""
Left: TypeAlias = "tuple[str, str, int | None, int]"
"""(topic, key, version, re-export that sent it for no change; 0 for none)."""

ID, PLACE, TOPIC, VALUE, ENTITY, HELD, SIZE = map(itemgetter, (0, 1, 2, 4, 7, 9, 10))
"""Fields of a live row."""
KEY_OF_TOPIC = itemgetter(2, 3)


@dataclass(slots=True)
class OutboxRecord:
    """One record for the producer, and the rows that it stands for.

    Its headers are made on demand. A block has thousands of records, and the garbage
    collector would go through all objects that they keep again and again.
    """

    topic: str
    key: str | None
    value: bytes | None = field(repr=False)
    row_class: int
    row_id: int
    """The newest of its rows."""
    place: bytes
    """The place of that row: its ctid."""
    head: Headers
    """The headers that the topic's records share."""
    written_at: str
    """ISO 8601, in UTC, without the zone."""
    version: int | None = None
    more: Mapping[str, str] | None = field(default=None, repr=False)
    """The caller's own headers; they win over the others."""
    entity: str | None = None
    """The entity whose current state is the value."""
    of_table: int | None = None
    """The re-export that sends it for a key of its table, and for no change."""
    older: list[Row] | None = None
    """Older rows of the key that this record stands for, too."""
    staged: int | None = None
    """The re-export of a DataFrame whose staged state is the value."""

    def supersede(self, older: OutboxRecord) -> None:
        """Stand for an older record of the key, too.

        A tombstone without a version takes that of an older tombstone, or one more than
        that of an older state. A state that is read when it leaves has its own.
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
    """Live rows that are sent unchanged: none is held, merged or loaded.

    Most blocks consist of such rows, and a backlog does. They are sent without an
    object for each record: making those would take a third of Python's time.
    """

    def __init__(self, rows: Sequence[LiveRow], heads: Mapping[str, Headers]) -> None:
        """Keep rows as they were read.

        Args:
            rows: in the order of sending.
            heads: the headers that a topic's records share, by topic.
        """
        self._rows = rows
        self._heads = heads

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def records(self) -> list[OutboxRecord]:
        """The rows as records, made when one of them is refused."""
        return [make_record(row, self._heads[TOPIC(row)]) for row in self._rows]

    @property
    def done(self) -> tuple[list[int], list[bytes]]:
        """The ids and places of all rows."""
        return [*map(ID, self._rows)], [*map(PLACE, self._rows)]

    @property
    def versions(self) -> Iterator[Left]:
        """What has left, once Kafka has the rows."""
        for _, _, topic, key, _, _, version, *_ in self._rows:
            if key is not None:
                yield topic, key, version, 0

    def make_messages(self) -> Iterator[Message]:
        """Yield the producer's arguments for each row.

        The headers are the same as its record's, in one object that is filled anew for
        each row: the producer copies them.
        """
        last, time, written_at = None, None, ""
        headers: dict[str, str | bytes | None] = {}
        for row_id, _, topic, key, value, more, version, _, at, _, _ in self._rows:
            if topic != last:
                last, time = topic, None
                headers = {"ce_id": None, **dict(self._heads[topic])}
            # Rows of one statement may have the same time.
            if at != time:
                time, written_at = at, at[1:-1]
                headers["ce_time"] = f"{written_at}Z"
            # The time makes it unique: a server that lost commits reuses their ids.
            headers["ce_id"] = f"{row_id}-{written_at}"
            if version is not None:
                headers["ce_version"] = str(version)
            else:
                headers.pop("ce_version", None)
            yield topic, value, key, {**headers, **more} if more else headers


Records: TypeAlias = "list[OutboxRecord] | PlainRows"


def make_record(row: LiveRow, head: Headers) -> OutboxRecord:
    """Make a row's record; ``head`` are the headers that its topic's records share."""
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
    """Return a list of records, made from plain rows if need be."""
    return records.records if isinstance(records, PlainRows) else records


def make_messages(records: Records) -> Iterator[Message]:
    """Return the producer's arguments for each record."""
    if isinstance(records, PlainRows):
        return records.make_messages()
    return ((one.topic, one.value, one.key, one.make_headers()) for one in records)


class BatchRows:
    """Rows of re-exports, sorted into held, dropped, waiting and left ones."""

    def __init__(self, rows: Iterable[BatchRow], known: Set[int] | None = None) -> None:
        """Sort the rows, which stay in the order in which they were read.

        Args:
            rows: as they were read.
            known: ids of the rows that were there when the block's live rows were read.
                Only these are dropped because of a live row: the state that was loaded
                for it may lack the change of another one. None: all.
        """
        self.reexports: set[int] = set()
        """The re-exports of the rows that are not left."""
        self.held: list[Row] = []
        self.dropped: list[Row] = []
        self.waiting: dict[int, list[BatchRow]] = {}
        """By re-export: the rows that leave as its rate allows."""
        self.left = 0
        """How many stay in the outbox until the live rows of their keys have left."""
        for row in rows:
            row_id, place, _, _, _, reexport_id, newer, state, held, *_ = row
            is_over = state in (None, "cancelled")
            if not is_over and newer is not None:
                is_over = newer and (known is None or row_id in known)
                if not is_over:
                    self.left += 1
                    continue
            self.reexports.add(reexport_id)
            # Drop these even when they are held: no consumer needs them.
            if is_over:
                self.dropped.append((BATCH, row_id, place))
            elif held:
                self.held.append((BATCH, row_id, place))
            else:
                self.waiting.setdefault(reexport_id, []).append(row)

    def share(self, room: int) -> dict[int, int]:
        """Share the room of a block: how many rows of each re-export may leave."""
        shares = {}
        smallest_first = sorted(self.waiting.items(), key=lambda one: len(one[1]))
        for place, (reexport_id, rows) in enumerate(smallest_first):
            shares[reexport_id] = min(len(rows), room // (len(smallest_first) - place))
            room -= shares[reexport_id]
        return shares


class Hold(NamedTuple):
    """A hold keeps back the rows of a key, one row without a key, or a whole topic."""

    topic: str
    key: str | None
    """None for a hold of one row, or of the whole topic."""
    row_id: int | None
    """The held row, if it has no key."""
    error: str

    @property
    def is_of_topic(self) -> bool:
        """Whether it keeps back all rows of its topic."""
        return self.key is None and self.row_id is None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A record that cannot be sent."""

    record: OutboxRecord
    error: str
    whole_topic: bool = False
    """Whether every record of the topic would be refused now."""

    @property
    def hold(self) -> Hold:
        """The hold that this refusal leads to."""
        record = self.record
        if self.whole_topic:
            return Hold(record.topic, None, None, self.error)
        row_id = record.row_id if record.key is None else None
        return Hold(record.topic, record.key, row_id, self.error)


@dataclass(slots=True)
class Block:
    """The records of one Kafka transaction, and the rows that are deleted after it."""

    outgoing: Records = field(default_factory=list)
    """The records, or plain rows that have not been made into records."""
    dropped: list[Row] = field(default_factory=list)
    """Rows that are deleted without being sent."""
    refusals: list[Refusal] = field(default_factory=list)
    """Records that cannot be sent."""
    behind: list[Row] = field(default_factory=list)
    """Rows that wait behind held or refused ones."""
    reexports: set[int] = field(default_factory=set)
    """The re-exports of the block's rows, which may be the last ones of theirs."""
    limited: dict[int, list[Limited]] = field(default_factory=dict)
    """By re-export: its records, which leave as its rate allows."""
    granted_at: float = 0.0
    """When the rates were asked, by the monotonic clock; 0: they were not asked yet."""
    shard: int = 0
    """The shard of the rows."""
    retried: bool = False
    """Whether the block is one held row that is tried again."""

    @property
    def records(self) -> list[OutboxRecord]:
        """The records; plain rows become records on demand."""
        self.outgoing = as_records(self.outgoing)
        return self.outgoing

    @property
    def done(self) -> tuple[list[int], list[bytes]]:
        """Ids and places of all rows to delete once the records are in Kafka."""
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

    @property
    def versions(self) -> Iterator[Left]:
        """What has left of each key, once Kafka has the records."""
        if isinstance(self.outgoing, PlainRows):
            yield from self.outgoing.versions
            return
        for one in self.outgoing:
            if one.key is not None:
                yield one.topic, one.key, one.version, one.of_table or 0

    def __bool__(self) -> bool:
        return bool(self.outgoing or self.dropped or self.refusals or self.behind)

    def drop(self, records: Iterable[OutboxRecord]) -> None:
        """Delete the rows of these records without sending them."""
        dropped = {*map(id, records)}
        kept = []
        for record in self.records:
            if id(record) in dropped:
                self.dropped += record.rows
            else:
                kept.append(record)
        self.outgoing = kept

    def leave(self, limited: Iterable[Limited]) -> None:
        """Leave the rows of these records in the outbox: they are read once more."""
        records: set[int] = set()
        rows: set[Row] = set()
        for record, earlier in limited:
            records.add(id(record))
            # The version of a tombstone may be theirs.
            rows.update(earlier)
        self.outgoing = [one for one in self.records if id(one) not in records]
        self.dropped = [row for row in self.dropped if row not in rows]

    def postpone(self, records: Iterable[OutboxRecord]) -> None:
        """Leave records for the next block, with all later ones of their keys."""
        unfit = {*map(id, records)}
        keys: set[tuple[str, str | None]] = set()
        left = []
        for record in self.records:
            which = record.topic, record.key
            if id(record) in unfit:
                keys.add(which)
            if which in keys:
                left.append(record)
        numbers = {*map(id, left)}
        earlier: dict[int, tuple[Row, ...]] = {}
        for reexport_id, found in self.limited.items():
            earlier.update((id(one), rows) for one, rows in found)
            self.limited[reexport_id] = [o for o in found if id(o[0]) not in numbers]
        self.leave((one, earlier.get(id(one), ())) for one in left)

    def keep(self, sent: Records, refusals: Sequence[Refusal]) -> None:
        """Keep these records; all others are refused, or wait behind refused ones."""
        if not refusals:
            return
        kept = as_records(sent)
        back = {id(one.record) for one in refusals}
        known = {id(one) for one in kept} | back
        for record in self.records:
            if id(record) not in known:
                self.behind += record.rows
                back.add(id(record))
        self.outgoing = kept
        self.refusals += refusals
        self._keep_earlier(back)

    def _keep_earlier(self, back: Set[int]) -> None:
        """Let the earlier rows of these records wait, too, instead of dropping them.

        The version of a tombstone may be theirs, and a hold keeps it only in its row.
        """
        earlier = {
            row
            for limited in self.limited.values()
            for record, rows in limited
            if id(record) in back
            for row in rows
        }
        if earlier:
            self.behind += [row for row in self.dropped if row in earlier]
            self.dropped = [row for row in self.dropped if row not in earlier]


class KeptBack:
    """Refused records, and records that must wait behind them.

    A block may have thousands of both, so sets replace comparing each with each.
    """

    def __init__(self, refusals: Iterable[Refusal] = ()) -> None:
        """Begin with these refusals."""
        self._records: set[int] = set()
        self._keys: set[tuple[str, str]] = set()
        self._topics: set[str] = set()
        for refusal in refusals:
            self.add(refusal)

    def add(self, refusal: Refusal) -> None:
        """Keep back one more record, with the others of its key or of its topic."""
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
    """Return the records that are neither refused nor kept back by a refused one."""
    back = KeptBack(refusals)
    return [record for record in records if record not in back]
