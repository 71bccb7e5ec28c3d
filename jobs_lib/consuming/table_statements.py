"""A table of a read model: its columns, and the statements that write its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, LiteralString, cast

import psycopg
from psycopg import sql
from psycopg.pq import PipelineStatus

from jobs_lib.consuming.arrays import write_array
from jobs_lib.errors import ConfigurationError, RecordError
from jobs_lib.postgres.values import identify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from jobs_lib.consuming.arrays import Write
    from jobs_lib.postgres.queries import Queries

_COLUMN = "column_{}"
"""How statements call the columns of a row: their own names may be any, such as those
of a change's other fields."""

_EXACT = {
    *("smallint", "integer", "bigint", "boolean", "uuid", "bytea", "date"),
    *("timestamp without time zone", "timestamp with time zone"),
}
"""Types of which equal values are written alike: to compare them takes less time than
to write them."""


class TableStatements:
    """A table that one read model writes.

    Several threads write blocks. One may move the table, or want its types anew, amid
    the block of another one, which goes on with what it has learnt.

    Args:
        name: ``table`` or ``schema.table``, as readers know it.
        key: the column for the records' key.
        queries: the statements, found at the first use.
    """

    def __init__(self, name: str, key: str, queries: Callable[[], Queries]) -> None:
        self.name = name
        self.key = key
        self._plain = identify(name)
        self._queries = queries
        self._types: dict[str, str] = {}
        """The type of each column."""
        self._stand_at(name)

    def _stand_at(self, place: str) -> None:
        self.place = place
        """The name that it has now."""
        self._table = identify(place)
        self._is_known = False
        """Whether the types are those that the table has now."""
        # The last: none of these statements has the name before.
        self._statements: dict[tuple[str, tuple[str, ...]], sql.SQL] = {}

    @property
    def identifier(self) -> str:
        """The name of the table that readers know, as SQL has it."""
        return self._plain.as_string()

    def move(self, place: str) -> None:
        """Give the table the name that it has now.

        A block that is under way is one of a partition that this process has lost.
        """
        if place != self.place:
            self._stand_at(place)

    def learn_types(
        self, connection: psycopg.Connection[Any], columns: AbstractSet[str]
    ) -> None:
        """Ask the database for the types of the columns, if one is not known yet.

        Raises:
            ConfigurationError: there is no such table, or it lacks a column. No record
                is at fault, so none may be skipped.
        """
        wanted = {self.key, *columns}
        if self._is_known and wanted <= self._types.keys():
            return
        place, name = self.place, self._table.as_string(connection)
        with connection.transaction():
            types = self._read_types(connection, place, name, wanted)
        self._types, self._statements = types, {}
        # It may have been moved meanwhile.
        self._is_known = place == self.place

    def read_plain_key_type(self, connection: psycopg.Connection[Any]) -> str:
        """Read the type of the key's column of the table that readers know now.

        It leaves alone what the threads that write blocks know.

        Raises:
            ConfigurationError: there is no such table, or it lacks the column.
        """
        types = self._read_types(connection, self.name, self.identifier, {self.key})
        return types[self.key]

    def _read_types(
        self,
        connection: psycopg.Connection[Any],
        place: str,
        name: str,
        wanted: AbstractSet[str],
    ) -> dict[str, str]:
        types: dict[str, str] = dict(
            connection.execute(
                self._queries()["read_column_types"], {"table": name}
            ).fetchall()
        )
        if not types:
            raise ConfigurationError(f"there is no table {place}: create it")
        if missing := sorted(wanted - types.keys()):
            raise ConfigurationError(
                f"the table {place} lacks {', '.join(missing)}: add the column, or "
                "leave it out of the function's result"
            )
        return types

    def learn_key_type(self, connection: psycopg.Connection[Any]) -> str:
        """Return the type of the column of the key, as PostgreSQL has written it.

        Raises:
            ConfigurationError: there is no such column.
        """
        # A block has learnt it before. To ask amid its statements would commit those.
        if connection.info.pipeline_status is PipelineStatus.OFF:
            self.learn_types(connection, {self.key})
        return self._types[self.key]

    def digest_rows(
        self,
        connection: psycopg.Connection[Any],
        keys: Sequence[str],
        columns: Sequence[str],
        write: Write,
    ) -> dict[str, str]:
        """Digest these columns of the rows of each key that has rows."""
        rows = connection.execute(
            self.compose("digest_rows", columns, {"record_key": "text"}, reads=True),
            {"record_key": write_array(keys, write)},
            prepare=True,
        ).fetchall()
        return dict(rows)

    def forget_types(self) -> None:
        """Ask for the types again: the table may have changed."""
        self._is_known = False

    def explain(self, error: BaseException) -> BaseException:
        """Return what is to be said of an error: the server's text repeats the row."""
        if not isinstance(error, psycopg.DataError | psycopg.IntegrityError):
            return error
        refused = error.diag.column_name or error.diag.constraint_name
        return RecordError(
            f"a row for the table {error.diag.table_name or self.place} is refused: "
            f"{type(error).__name__}" + (f" ({refused})" if refused else "")
        )

    def compose(
        self,
        template: str,
        columns: Sequence[str],
        others: Mapping[str, str],
        *,
        reads: bool = False,
    ) -> sql.SQL:
        """Compose a statement over rows with these columns, or find it again.

        Args:
            template: the query to fill in.
            columns: of the rows.
            others: what each row has beside them, with the types.
            reads: whether the columns are read, and not among the values.
        """
        known = template, tuple(columns)
        statements = self._statements
        if known not in statements:
            composed = self._compose(template, columns, others, reads)
            # To join its hundred parts takes as long as all else for a single record.
            statements[known] = sql.SQL(cast("Any", composed.as_string()))
        return statements[known]

    def compose_plain(
        self, connection: psycopg.Connection[Any], template: str
    ) -> sql.Composed:
        """Compose a statement about the whole table."""
        return self._fill(template, self._table, self.learn_key_type(connection))

    def fill(self, template: str, key_type: str) -> sql.Composed:
        """Fill in a template about the table that readers see.

        Args:
            template: the query to fill in.
            key_type: of the column of the key, as PostgreSQL has written it.
        """
        return self._fill(template, self._plain, key_type)

    def _fill(
        self, template: str, table: sql.Identifier, key_type: str
    ) -> sql.Composed:
        return self._queries().fill(
            template,
            table=table,
            key=sql.Identifier(self.key),
            key_type=as_type(key_type),
        )

    def list_keys(self, *, is_uuid: bool = False) -> sql.Composed:
        """Make a query of the columns key and version.

        Args:
            is_uuid: whether the keys are UUIDs, which a column of texts may have
                without hyphens.
        """
        return sql.SQL("select {}::{}::text as key, version from {}").format(
            sql.Identifier(self.key),
            as_type("uuid" if is_uuid else "text"),
            self._table,
        )

    def make_arrays(
        self, rows: Iterable[Mapping[str, Any]], columns: Sequence[str], write: Write
    ) -> dict[str, str]:
        """Make the statement's values of the rows, a column after the other."""
        found = list(rows)
        return {
            _COLUMN.format(number): write_array([row[name] for row in found], write)
            for number, name in enumerate(columns)
        }

    def _compose(
        self,
        template: str,
        columns: Sequence[str],
        others: Mapping[str, str],
        reads: bool,
    ) -> sql.Composed:
        names = [*map(sql.Identifier, columns)]
        written = () if reads else enumerate(columns)
        types = {
            **others,
            **{_COLUMN.format(n): self._types[name] for n, name in written},
        }
        fields = [
            sql.SQL("u.{0}::{1} as {0}").format(sql.Identifier(name), as_type(kind))
            for name, kind in types.items()
        ]
        incoming = sql.SQL(
            "select {fields}, u.record_key::{key_type} as row_key "
            "from unnest({arrays}) as u({names})"
        ).format(
            fields=sql.SQL(", ").join(fields),
            key_type=as_type(self._types[self.key]),
            arrays=sql.SQL(", ").join(
                sql.SQL("{}::text[]").format(sql.Placeholder(name)) for name in types
            ),
            names=sql.SQL(", ").join(map(sql.Identifier, types)),
        )
        return self._queries().fill(
            template,
            table=self._table,
            key=sql.Identifier(self.key),
            incoming=incoming,
            columns=sql.SQL("").join(sql.SQL(", {}").format(n) for n in names),
            values=sql.SQL("").join(
                sql.SQL(", r.{}").format(sql.Identifier(_COLUMN.format(n)))
                for n in range(len(names))
            ),
            read=sql.SQL(", ").join(sql.SQL("t.{}").format(n) for n in names),
            rewritten=sql.SQL(", ").join(
                sql.SQL("{} = r.{}").format(
                    name, sql.Identifier(_COLUMN.format(number))
                )
                for number, name in enumerate(names)
            ),
            changes=sql.SQL("").join(
                sql.SQL(", {0} = excluded.{0}").format(n) for n in names
            ),
            same=sql.SQL(" and ").join(
                sql.SQL(_find_comparison(types.get(_COLUMN.format(n), ""))).format(
                    name, sql.Identifier(_COLUMN.format(n))
                )
                for n, name in enumerate(names)
            )
            if names
            else sql.SQL("true"),
        )


def _find_comparison(kind: str) -> LiteralString:
    """Find how two values of a type are compared exactly.

    Of other types, such as numeric, two values may be equal that are written
    differently, or they cannot be compared at all, such as those of json.
    """
    if kind in _EXACT:
        return "t.{} is not distinct from r.{}"
    return "t.{}::text is not distinct from r.{}::text"


def as_type(name: str) -> sql.SQL:
    """A type, as PostgreSQL itself has written it."""
    return sql.SQL(cast("Any", name))
