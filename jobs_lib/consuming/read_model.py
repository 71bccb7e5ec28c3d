"""A read model: a table kept equal to a state topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from typing_extensions import TypeVar

from jobs_lib.consuming.handler import decode
from jobs_lib.consuming.keys import spell_key
from jobs_lib.consuming.record import Record, make_record, read_text
from jobs_lib.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from confluent_kafka import Message

    from jobs_lib.consuming.handler import Connection
    from jobs_lib.consuming.keys import KeyReader
    from jobs_lib.schemas.codec import Decoder

V = TypeVar("V", default=Any)
K = TypeVar("K", default=str)
RowOf = Callable[[Record[V, K]], Mapping[str, Any] | None]


class ReadModel:
    """Applies records to a table.

    Only a newer version replaces a row, so repeated and older records change nothing.
    They do not bring a deleted row back either: the version of a key's tombstone
    outlives its row. The version is the record's own (header ``ce_version``), else its
    offset. If a tombstone and a state have the same version, the first one received is
    the older one.

    Args:
        row_of: makes a row's columns from a record; None to have no row.
        table: ``table`` or ``schema.table``.
        key: the column for the record's key.
        decoder: reads the values.
        schema: finds the schema of this library's own tables, at the first use.
        read_key: reads the keys.
    """

    def __init__(
        self,
        row_of: RowOf[Any, Any],
        table: str,
        key: str,
        decoder: Decoder,
        schema: Callable[[], str],
        read_key: KeyReader = read_text,
    ) -> None:
        self._read_key = read_key
        self._row_of = row_of
        self._name = table
        self._table = sql.Identifier(*table.split("."))
        self._key = sql.Identifier(key)
        self._decoder = decoder
        self._schema = schema
        self._upserts: dict[tuple[str, ...], sql.Composed] = {}

    def apply(
        self,
        connection: Connection,
        messages: Sequence[Message],
        highest: int | None = None,
    ) -> None:
        """Apply a block of one partition, in the open transaction.

        Args:
            connection: with the transaction.
            messages: the records.
            highest: the highest offset to go on from that the partition ever had.
        """
        try:
            self._write(connection, messages, highest)
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            # Leave the server's text out: it repeats the row.
            refused = error.diag.column_name or error.diag.constraint_name
            raise RecordError(
                f"a row for the table {self._name} is refused: {type(error).__name__}"
                + (f" ({refused})" if refused else "")
            ) from None

    def _write(
        self,
        connection: Connection,
        messages: Sequence[Message],
        highest: int | None,
    ) -> None:
        # Only the newest records of each key in the block matter.
        newest: dict[Any, tuple[int, list[Record[Any, Any]]]] = {}
        for message in messages:
            value = decode(message, self._decoder)
            record = make_record(message, value, self._read_key, highest)
            version = record.offset if record.version is None else record.version
            known = newest.get(record.key)
            if known is None or known[0] < version:
                newest[record.key] = (version, [record])
            elif known[0] == version:
                # A tombstone and a state may have the same version, and the effect of
                # a state depends on the tombstone before it.
                if (known[1][-1].value is None) is (record.value is None):
                    known[1].pop()
                known[1].append(record)
        with connection.pipeline():
            for key, (version, records) in newest.items():
                for record in records:
                    self._write_record(connection, key, version, record)

    def _write_record(
        self,
        connection: Connection,
        key: Any,
        version: int,
        record: Record[Any, Any],
    ) -> None:
        this = (self._name, None if key is None else spell_key(key), version)
        row = None if record.value is None else self._row_of(record)
        if row is not None:
            connection.execute(
                self._upsert(tuple(row)), (key, version, *row.values(), *this, version)
            )
        elif key is not None:
            connection.execute(
                self._remove, (key, version, version, *this, *this, version)
            )

    @cached_property
    def _gone(self) -> sql.Identifier:
        return sql.Identifier(self._schema(), "model_keys")

    # If a tombstone and a state have equal versions, the first one received is the
    # older. The tombstone notes whether it removed such a state (`of_equal`). If it
    # did, a repeat of that state stays out. If not, the state is of a key that came
    # back, and a repeat of the tombstone leaves it there.

    @cached_property
    def _remove(self) -> sql.Composed:
        return sql.SQL(
            "with removed as (delete from {table} where {key} = %s and (version < %s "
            "or (version = %s and not exists (select from {gone} g "
            "where g.model = %s and g.key = %s and g.version >= %s))) "
            "returning version) "
            "insert into {gone} as g (model, key, version, of_equal) "
            "select %s, %s, %s, exists (select from removed where version = %s) "
            "on conflict (model, key) do update set version = excluded.version, "
            "noted_at = excluded.noted_at, of_equal = excluded.of_equal "
            "where g.version < excluded.version"
        ).format(table=self._table, key=self._key, gone=self._gone)

    def _upsert(self, columns: tuple[str, ...]) -> sql.Composed:
        if columns not in self._upserts:
            names = [sql.Identifier(column) for column in columns]
            self._upserts[columns] = sql.SQL(
                "insert into {table} as kept ({key}, version{columns}) "
                "select %s, %s{values} where not exists (select from {gone} g "
                "where g.model = %s and g.key = %s and (g.version > %s "
                "or (g.version = %s and g.of_equal))) "
                "on conflict ({key}) do update set version = excluded.version{changes} "
                "where kept.version < excluded.version"
            ).format(
                table=self._table,
                key=self._key,
                gone=self._gone,
                columns=sql.SQL("").join(sql.SQL(", {}").format(n) for n in names),
                values=sql.SQL(", %s") * len(names),
                changes=sql.SQL("").join(
                    sql.SQL(", {0} = excluded.{0}").format(n) for n in names
                ),
            )
        return self._upserts[columns]
