"""Read models whose versions stand beside the tables, which have any form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

from psycopg import sql

from jobs_lib.consuming.arrays import make_writer, write_array
from jobs_lib.consuming.changes import check_row
from jobs_lib.consuming.read_model import ReadModel, make_change_arrays
from jobs_lib.consuming.record import Record, read_text
from jobs_lib.consuming.table_statements import TableStatements, as_type
from jobs_lib.errors import RecordError

if TYPE_CHECKING:
    import psycopg

    from jobs_lib.consuming.arrays import Write
    from jobs_lib.consuming.changes import Change, Changes
    from jobs_lib.consuming.keys import KeyReader
    from jobs_lib.consuming.read_model import RowOf
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.schemas.codec import Decoder

Row: TypeAlias = "Mapping[str, Any]"
KeyedRow: TypeAlias = "tuple[str, Row]"
"""(the text of the key, the columns)"""

_KEY = {"record_key": "text"}


class SideModel(ReadModel):
    """Keeps one or more tables; the versions of all keys are in ``model_keys``.

    A record becomes rows of several tables under one version. What the function makes
    for a table is a mapping for one row, a list of mappings for any number of rows, or
    None for none.
    """

    def __init__(
        self,
        row_of: RowOf[Any, Any],
        tables: Mapping[str, str],
        decoder: Decoder,
        queries: Callable[[], Queries],
        read_key: KeyReader = read_text,
        version: int = 1,
    ) -> None:
        """Prepare; ``tables`` has the column for the record's key of each table."""

        def make(record: Record[Any, Any]) -> Row | None:
            made = row_of(record)
            if made is None:
                return None
            check_row(made)
            if unknown := sorted({*made} - tables.keys()):
                raise RecordError(
                    f"there are rows for {', '.join(map(repr, unknown))}, and the read "
                    f"model has the tables {', '.join(tables)}: name it in `tables`"
                )
            for table, rows in made.items():
                _check_rows(table, rows)
            return made

        first = next(iter(tables))
        super().__init__(first, version, make, decoder, queries, read_key)
        self._tables = [TableStatements(*one, queries) for one in tables.items()]

    def place(self, places: Mapping[str, str]) -> None:
        """See :class:`ReadModel`."""
        for table in self._tables:
            table.move(places[table.name])

    def learn_types(
        self, connection: psycopg.Connection[Any], changes: Changes
    ) -> None:
        """See :class:`ReadModel`."""
        for table in self._tables:
            table.learn_types(connection, _list_columns(table, changes))

    def write(
        self,
        connection: psycopg.Connection[Any],
        changes: Changes,
        topic_id: UUID | None,
    ) -> None:
        """See :class:`ReadModel`."""
        write = make_writer(connection)
        place = {"topic_id": topic_id, "partition": changes.partition}
        for wave in changes.waves:
            gone = [row is None for _, _, row, _, _ in wave]
            noted = connection.execute(
                self._queries()["note_keys"],
                {
                    **make_change_arrays(wave, write),
                    "is_gone": write_array(gone, write),
                    "model": self._name,
                    "again": self.again,
                    **place,
                },
                prepare=True,
            ).fetchall()
            self._write_rows(connection, _find_noted(wave, noted, write), write)
        for wave in changes.left.waves if changes.left else ():
            if not (states := [one for one in wave if None not in one[1:3]]):
                continue
            found = connection.execute(
                self._queries()["find_same_states"],
                {**make_change_arrays(states, write), "model": self._name},
                prepare=True,
            ).fetchall()
            self._write_rows(connection, _find_noted(states, found, write), write)
        if self.again:
            self.note_shown(connection, changes, write)

    def digest(
        self,
        connection: psycopg.Connection[Any],
        changes: Changes,
        keys: Sequence[str],
        write: Write,
    ) -> dict[str, Any]:
        """See :class:`ReadModel`."""
        found: dict[str, Any] = {}
        for table in self._tables:
            columns = sorted(_list_columns(table, changes)) or [table.key]
            digests = table.digest_rows(connection, keys, columns, write)
            for key, digest in digests.items():
                found.setdefault(key, {})[table.name] = digest
        return found

    def _read_versions(
        self, connection: psycopg.Connection[Any], keys: Sequence[str], write: Write
    ) -> dict[str, int]:
        rows = connection.execute(
            self._queries()["read_noted_versions"],
            {"record_key": write_array(keys, write), "model": self._name},
            prepare=True,
        ).fetchall()
        return dict(rows)

    def list_keys(self) -> sql.Composable:
        """See :class:`ReadModel`."""
        return self._queries().fill(
            "list_side_keys",
            model=sql.Literal(self._name),
            key_type=as_type("uuid" if self.key_type is UUID else "text"),
        )

    def _find_key(
        self, connection: psycopg.Connection[Any], named: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        return connection.execute(self._queries()["find_noted_key"], named).fetchone()

    def note_keys(self, connection: psycopg.Connection[Any]) -> None:
        """See :class:`ReadModel`."""
        connection.execute(self._queries()["note_side_keys"], {"model": self._name})

    def remove_unshown(
        self, connection: psycopg.Connection[Any], rows: int
    ) -> tuple[int, int]:
        """See :class:`ReadModel`."""
        row = connection.execute(
            self._queries()["end_unshown"], {"model": self._name, "rows": rows}
        ).fetchone()
        assert row is not None
        gone, looked = row
        if gone:
            write = make_writer(connection)
            # A later table may refer to an earlier one.
            for table in reversed(self._tables):
                table.learn_types(connection, {table.key})
                connection.execute(
                    table.compose("delete_rows", (), _KEY),
                    {"record_key": write_array(gone, write)},
                )
        return looked, len(gone)

    @property
    def keyed_table(self) -> None:
        """See :class:`ReadModel`."""

    def fill_known(self, template: str, key_type: str) -> sql.Composed:
        """See :class:`ReadModel`."""
        queries = self._queries()
        return queries.fill(
            template,
            known=queries.fill("known_beside"),
            is_gone=queries.fill("gone_beside"),
            key_type=as_type(key_type),
        )

    def explain(self, error: BaseException) -> BaseException:
        """See :class:`ReadModel`."""
        for table in self._tables:
            table.forget_types()
        return self._tables[0].explain(error)

    def _write_rows(
        self,
        connection: psycopg.Connection[Any],
        changes: Mapping[str, Change],
        write: Write,
    ) -> None:
        """Write the rows of keys whose record is newer than what is known of them."""
        made = [(table, _Rows(table, changes)) for table in self._tables]
        # A later table may refer to an earlier one.
        for table, rows in reversed(made):
            if rows.emptied:
                connection.execute(
                    table.compose("delete_rows", (), _KEY),
                    {"record_key": write_array(rows.emptied, write)},
                    prepare=True,
                )
        for table, rows in made:
            template = "insert_rows" if rows.are_many else "upsert_rows"
            for columns, same in rows.by_columns():
                keys = [key for key, _ in same]
                connection.execute(
                    table.compose(template, columns, _KEY),
                    {
                        "record_key": write_array(keys, write),
                        **table.make_arrays((row for _, row in same), columns, write),
                    },
                    prepare=True,
                )


class _Rows:
    """The rows of one table that some changes make."""

    def __init__(self, table: TableStatements, changes: Mapping[str, Change]) -> None:
        made = {
            key: (row or {}).get(table.name)
            for key, (_, _, row, _, _) in changes.items()
        }
        self.are_many = any(isinstance(one, list | tuple) for one in made.values())
        """Whether a key may have several rows."""
        self.emptied = [
            key for key, one in made.items() if self.are_many or one is None
        ]
        """Keys whose rows go before others come."""
        self._rows = [
            (key, row) for key, one in made.items() for row in _list_rows(one)
        ]

    def by_columns(self) -> Iterator[tuple[Sequence[str], list[KeyedRow]]]:
        """Yield the rows that have the same columns."""
        found: dict[tuple[str, ...], list[KeyedRow]] = {}
        for key, row in self._rows:
            found.setdefault(tuple(row), []).append((key, row))
        yield from found.items()


def _find_noted(
    wave: Sequence[Change], noted: Sequence[tuple[str]], write: Write
) -> dict[str, Change]:
    """Find the changes whose keys the database has returned, by the keys' texts."""
    keys = {key for (key,) in noted}
    texts = ((write(change[0]) or "", change) for change in wave)
    return {text: change for text, change in texts if text in keys}


def _list_columns(table: TableStatements, changes: Changes) -> set[str]:
    made = [row for wave in changes.waves for _, _, row, _, _ in wave if row]
    rows = (one for row in made for one in _list_rows(row.get(table.name)))
    return {name for row in rows for name in row}


def put_in(table: str, row_of: RowOf[Any, Any]) -> RowOf[Any, Any]:
    """Make a function that says for which table the rows of ``row_of`` are."""

    def make(record: Record[Any, Any]) -> Row | None:
        row = row_of(record)
        return None if row is None else {table: row}

    return make


def _check_rows(table: str, rows: object) -> None:
    """Refuse what would be read as no rows, such as a generator: it is read twice.

    Raises:
        RecordError: it is neither None, a mapping nor a list of mappings.
    """
    if rows is None or isinstance(rows, Mapping):
        return
    wrong = type(rows).__name__
    if isinstance(rows, list | tuple):
        others = [row for row in rows if not isinstance(row, Mapping)]
        if not others:
            return
        wrong = f"{wrong} of {type(others[0]).__name__}"
    raise RecordError(
        f"the read model's function has returned the type {wrong} for the table "
        f"{table!r}: return a mapping for one row, a list of mappings for any number, "
        "or None"
    )


def _list_rows(made: Row | Sequence[Row] | None) -> Sequence[Row]:
    if made is None:
        return ()
    return [made] if isinstance(made, Mapping) else made
