"""The service's own table of an entity, as the planner and the loaders see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from psycopg import sql

from jobs_lib.errors import ReexportError
from jobs_lib.outbox.keys import split_key
from jobs_lib.outbox.staged import OF_FRAME
from jobs_lib.postgres.values import identify

if TYPE_CHECKING:
    import psycopg

    from jobs_lib.outbox.topic import Entity
    from jobs_lib.postgres.queries import Queries


@dataclass(frozen=True, slots=True)
class Source:
    """A table and the columns of its key; plain data, so that a task can get it."""

    table: str
    """``table`` or ``schema.table``."""
    columns: tuple[str, ...]
    """Of the key."""
    types: tuple[str, ...]
    """The columns' types, as written in SQL."""
    nullable: bool
    unique: bool
    """Whether an index keeps the key unique; otherwise duplicates are removed."""
    estimate: int | None
    """Rows by the server's statistics; None if there are none, as for a view."""

    def query(
        self,
        queries: Queries,
        name: str,
        bounds: tuple[str | None, str | None] = (None, None),
        **numbers: float,
    ) -> sql.Composed:
        """Compose one of the queries ``source_…`` for this table.

        Args:
            queries: for the library's schema.
            name: of the query.
            bounds: the least key that it reads, and the key before which it stops,
                as those of records; None for no bound.
            numbers: what else the query asks for.
        """
        text = cast("Any", queries[name].as_string(None))
        columns = [sql.Identifier(one) for one in self.columns]
        return sql.SQL(text).format(
            table=identify(self.table),
            columns=sql.SQL(", ").join(columns),
            text=_text(columns),
            present=sql.SQL(" and ").join(
                sql.SQL("{} is not null").format(one) for one in columns
            ),
            within=self._within(columns, bounds),
            **{name: sql.Literal(number) for name, number in numbers.items()},
        )

    def keys_between(
        self, queries: Queries, lower: str | None, upper: str | None
    ) -> sql.Composed:
        """Compose the query that reads the keys of a range, each once."""
        name = "source_keys_unique" if self.unique else "source_keys"
        return self.query(queries, name, (lower, upper))

    def packed_keys_between(
        self, queries: Queries, lower: str | None, upper: str | None
    ) -> sql.Composed:
        """Compose the query that reads them as two values: bytes, and lengths."""
        text = cast("Any", queries["source_packed_keys"].as_string(None))
        return sql.SQL(text).format(keys=self.keys_between(queries, lower, upper))

    def _within(
        self,
        columns: list[sql.Identifier],
        bounds: tuple[str | None, str | None],
    ) -> sql.Composable:
        # A bound that is missing is left out. An index does not find the rows of
        # `k >= x or x is null`, and each range would read the whole table.
        found = [
            sql.SQL("({}) {} ({})").format(
                sql.SQL(", ").join(columns), sql.SQL(sign), self._values(bound)
            )
            for bound, sign in zip(bounds, (">=", "<"), strict=True)
            if bound is not None
        ]
        return sql.SQL(" and ").join(found) if found else sql.SQL("true")

    def _values(self, bound: str) -> sql.Composed:
        # In the columns' own types: '10' is less than '9' only as a text.
        return sql.SQL(", ").join(
            # The type comes from the server's catalogue, which quotes it if needed.
            sql.SQL("{}::{}").format(sql.Literal(part), sql.SQL(cast("Any", type_)))
            for part, type_ in zip(
                split_key(bound, len(self.columns)), self.types, strict=True
            )
        )


def find_source(
    connection: psycopg.Connection[Any], queries: Queries, entity: Entity
) -> Source:
    """Find the table and the key's columns of an entity.

    Raises:
        ReexportError: there is no such table or column in this database.
    """
    name = identify(entity.source).as_string(connection)
    columns = entity.columns
    row = connection.execute(
        queries["find_source"], {"table": name, "keys": list(columns)}
    ).fetchone()
    if row is None or tuple(row[0]) != columns:
        missing = [one for one in columns if row is None or one not in row[0]]
        raise ReexportError(
            f"the entity {entity.name!r} says that its states lie in the table "
            f"{entity.source!r} under the key column {missing[0]!r}, but the database "
            "has no such table or column: correct `source` and `key` of @app.entity, "
            "or write the table as schema.table"
        )
    _, types, not_null, unique, known, rows = row
    estimate = rows if known else None
    return Source(entity.source, columns, tuple(types), not not_null, unique, estimate)


def _text(columns: list[sql.Identifier]) -> sql.Composed:
    """The record's key, as :mod:`jobs_lib.outbox.keys` says."""
    texts = [sql.SQL("{}::text").format(one) for one in columns]
    if len(texts) == 1:
        return texts[0]
    return sql.SQL("json_build_array({})::text").format(sql.SQL(", ").join(texts))


def refuse_other_source(
    connection: psycopg.Connection[Any], queries: Queries, reexport: int, wanted: str
) -> None:
    """Refuse to go on with a re-export whose states come from elsewhere.

    Raises:
        ReexportError: its source is another kind than the wanted one.
    """
    row = connection.execute(
        queries["read_source"], {"reexport": reexport}
    ).fetchone() or (wanted,)
    if row[0] != wanted:
        of_frame = row[0] == OF_FRAME
        source = "a DataFrame" if of_frame else "the entity's table"
        way_out = "give it again" if of_frame else "start it without a DataFrame"
        raise ReexportError(
            f"the unfinished re-export {reexport} takes its states from {source}: "
            f"{way_out} to go on with it, or cancel it"
        )
