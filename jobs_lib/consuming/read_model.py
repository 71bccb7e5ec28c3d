"""A read model: a table kept equal to a state topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg
from psycopg import sql
from typing_extensions import TypeVar

from jobs_lib.consuming.arrays import make_writer, write_array
from jobs_lib.consuming.handler import decode
from jobs_lib.consuming.record import Record, describe, make_record, read_text
from jobs_lib.consuming.subscription import BlockError
from jobs_lib.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from confluent_kafka import Message

    from jobs_lib.consuming.arrays import Write
    from jobs_lib.consuming.keys import KeyReader
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.schemas.codec import Decoder

V = TypeVar("V", default=Any)
K = TypeVar("K", default=str)
RowOf = Callable[[Record[V, K]], Mapping[str, Any] | None]
Columns = tuple[str, ...]

_KNOWN = {"record_key": "text", "record_offset": "bigint", "appended_ms": "bigint"}
"""What each change has beside the row, with its type."""
_STATES = {True: "upsert_states", False: "upsert_placed"}
_ENDS = {True: "remove_ended", False: "remove_placed"}
"""The templates for changes with and without versions."""


Read: TypeAlias = "tuple[int | None, int, Record[Any, Any]]"
"""(version, index in the block, record)"""
Change: TypeAlias = "tuple[Any, int | None, Mapping[str, Any] | None, int, int]"
"""(key, version, row, offset, timestamp in Kafka in milliseconds) of a record. The row
is None if the key is to have none. A block has thousands: a class would be slow."""
Kind: TypeAlias = "tuple[bool, Columns | None]"
"""Whether changes have a version, and the columns of their rows, if they have rows: all
changes of one kind are written by one statement."""


@dataclass
class Changes:
    """The changes of a block, of one partition."""

    partition: int = 0
    waves: list[list[Change]] = field(default_factory=list)
    """Each has a key once. A key has more than one change if the effect of the later
    one depends on the one before; then it is in a later wave."""

    @cached_property
    def kinds(self) -> list[tuple[Kind, list[Change]]]:
        """The changes by their kind, in the order in which they are written."""
        found: list[tuple[Kind, list[Change]]] = []
        for wave in self.waves:
            kinds: dict[Kind, list[Change]] = {}
            for change in wave:
                _, version, row, _, _ = change
                kind = version is not None, None if row is None else tuple(row)
                kinds.setdefault(kind, []).append(change)
            found += kinds.items()
        return found


class ReadModel:
    """Applies records to a table.

    Only a newer version replaces a row, so repeated and older records change nothing.
    They do not bring a deleted row back either: the version of a key's tombstone
    outlives its row. Records without a version (header ``ce_version``) are compared by
    their places: within a partition by the offset, else by their time. A tombstone
    without a version ends whatever version its key has.

    Args:
        row_of: makes a row's columns from a record; None to have no row.
        table: ``table`` or ``schema.table``.
        key: the column for the record's key.
        decoder: reads the values.
        queries: the statements, found at the first use.
        read_key: reads the keys.
    """

    def __init__(
        self,
        row_of: RowOf[Any, Any],
        table: str,
        key: str,
        decoder: Decoder,
        queries: Callable[[], Queries],
        read_key: KeyReader = read_text,
    ) -> None:
        self._read_key = read_key
        self._row_of = row_of
        self._name = table
        self._table = sql.Identifier(*table.split("."))
        self._key = key
        self._decoder = decoder
        self._queries = queries
        self._types: dict[str, str] = {}
        """The type of each column of the table."""
        self._statements: dict[Kind, sql.Composed] = {}

    def read(self, messages: Sequence[Message], highest: int | None = None) -> Changes:
        """Read the records of a block, of one partition.

        Args:
            messages: the records.
            highest: the highest offset to go on from that the partition ever had.

        Raises:
            BlockError: a record cannot be read, or the function has failed.
        """
        # Only the newest records of each key matter. Their rows are made at the end.
        kept: dict[Any, list[Read]] = {}
        for index, message in enumerate(messages):
            try:
                value = decode(message, self._decoder)
                record = make_record(message, value, self._read_key, highest)
                version = record.version
            except BaseException as error:
                raise BlockError(index, error) from error
            key = record.key
            known = kept.get(key)
            if known is None or version is None:
                kept[key] = [(version, index, record)]
            else:
                _add(known, (version, index, record))
        if None in kept:
            _, index, record = kept[None][0]
            raise BlockError(index, _refuse_keyless(messages[index]))
        changes = Changes(messages[0].partition() or 0)
        for key, records in kept.items():
            for wave, (version, index, record) in enumerate(records):
                if wave == len(changes.waves):
                    changes.waves.append([])
                try:
                    row = None if record.value is None else self._row_of(record)
                except BaseException as error:
                    raise BlockError(index, error) from error
                message = messages[index]
                changes.waves[wave].append(
                    (key, version, row, message.offset() or 0, message.timestamp()[1])
                )
        return changes

    def learn_types(
        self, connection: psycopg.Connection[Any], changes: Changes
    ) -> None:
        """Ask the database for the types of the columns, if one is not known yet.

        Raises:
            RecordError: the table lacks a column.
        """
        columns = {name for (_, row), _ in changes.kinds for name in row or ()}
        wanted = {self._key, "version", *columns}
        if wanted <= self._types.keys():
            return
        name = self._table.as_string(connection)
        with connection.transaction():
            rows = connection.execute(
                self._queries()["read_column_types"], {"table": name}
            ).fetchall()
        self._statements.clear()
        self._types = dict(rows)
        if missing := sorted(wanted - self._types.keys()):
            raise RecordError(
                f"the table {self._name} lacks {', '.join(missing)}: add the column, "
                "or leave it out of the function's result"
                if self._types
                else f"there is no table {self._name}: create it, with a column version"
            )

    def write(
        self,
        connection: psycopg.Connection[Any],
        changes: Changes,
        topic_id: UUID | None,
    ) -> None:
        """Write the changes in the open transaction, in the pipeline if there is one.

        Args:
            connection: with the transaction.
            changes: of a block.
            topic_id: the topic, as Kafka names it for ever; None if that is not known.
        """
        write = make_writer(connection)
        for kind, same in changes.kinds:
            connection.execute(
                self._state(kind),
                {
                    **self._make_arrays(kind, same, write),
                    "model": self._name,
                    "topic_id": topic_id,
                    "partition": changes.partition,
                },
                prepare=True,
            )

    def explain(self, error: BaseException) -> BaseException:
        """Return what is to be said of an error of :meth:`write`."""
        self._types = {}  # the table may have changed
        if not isinstance(error, psycopg.DataError | psycopg.IntegrityError):
            return error
        # Leave the server's text out: it repeats the row.
        refused = error.diag.column_name or error.diag.constraint_name
        return RecordError(
            f"a row for the table {self._name} is refused: {type(error).__name__}"
            + (f" ({refused})" if refused else "")
        )

    def _make_arrays(
        self, kind: Kind, changes: list[Change], write: Write
    ) -> dict[str, str]:
        keys, versions, rows, offsets, times = zip(*changes, strict=True)
        arrays = {
            "record_key": write_array(keys, write),
            "version": write_array(versions, write),
            "record_offset": write_array(offsets, write),
            "appended_ms": write_array(times, write),
        }
        columns = kind[1] or ()
        for number, column in enumerate(columns):
            values = [row[column] for row in rows]
            arrays[f"column_{number}"] = write_array(values, write)
        return arrays

    def _state(self, kind: Kind) -> sql.Composed:
        if kind not in self._statements:
            self._statements[kind] = self._compose(*kind)
        return self._statements[kind]

    def _compose(self, has_version: bool, columns: Columns | None) -> sql.Composed:
        """Compose the statement for one kind of changes."""
        names = [sql.Identifier(column) for column in columns or ()]
        # The columns may have any names, such as those of a change's other fields.
        values = [sql.Identifier(f"column_{n}") for n in range(len(names))]
        template = (_ENDS if columns is None else _STATES)[has_version]
        return self._queries().fill(
            template,
            table=self._table,
            key=sql.Identifier(self._key),
            incoming=self._compose_incoming(columns or ()),
            columns=sql.SQL("").join(sql.SQL(", {}").format(n) for n in names),
            values=sql.SQL("").join(sql.SQL(", r.{}").format(v) for v in values),
            changes=sql.SQL("").join(
                sql.SQL(", {0} = excluded.{0}").format(n) for n in names
            ),
        )

    def _compose_incoming(self, columns: Columns) -> sql.Composed:
        types = {
            **_KNOWN,
            "version": "bigint",
            **{f"column_{n}": self._types[name] for n, name in enumerate(columns)},
        }
        fields = [
            sql.SQL("u.{0}::{1} as {0}").format(sql.Identifier(name), sql.SQL(kind))
            for name, kind in types.items()
        ]
        return sql.SQL(
            "select {fields}, u.record_key::{key_type} as row_key "
            "from unnest({arrays}) as u({names})"
        ).format(
            fields=sql.SQL(", ").join(fields),
            key_type=sql.SQL(self._types[self._key]),
            arrays=sql.SQL(", ").join(
                sql.SQL("{}::text[]").format(sql.Placeholder(name)) for name in types
            ),
            names=sql.SQL(", ").join(map(sql.Identifier, types)),
        )


def _refuse_keyless(message: Message) -> RecordError:
    return RecordError(
        f"the record at {describe(message)} has no key: a read model has a row for "
        "each key"
    )


def _add(known: list[Read], new: Read) -> None:
    """Add a record with a version to the newest ones of its key."""
    version, _, record = new
    last_version, _, last = known[-1]
    if last_version is None:
        known.append(new)
    elif last_version < version:  # type: ignore[operator]
        # Those with versions go; one without, before them, has an effect of its own.
        del known[int(known[0][0] is None) :]
        known.append(new)
    elif last_version == version:
        # A tombstone and a state may have the same version, and the effect of a state
        # depends on the tombstone before it.
        if (last.value is None) is (record.value is None):
            known.pop()
        known.append(new)
