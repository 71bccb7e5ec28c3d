"""The service's own table of an entity, as the planner and the loaders see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from psycopg import sql

from jobs_lib.errors import ReexportError

if TYPE_CHECKING:
    import psycopg

    from jobs_lib.outbox.topic import Entity
    from jobs_lib.postgres.queries import Queries


@dataclass(frozen=True, slots=True)
class Source:
    """A table and its key column; plain data, so that it can be sent to a task."""

    table: str
    """``table`` or ``schema.table``."""
    key: str
    type: str
    """The key's type, as written in SQL."""
    nullable: bool
    unique: bool
    """Whether an index keeps the key unique; otherwise duplicates are removed."""
    estimate: int | None
    """Rows by the server's statistics; None if there are none, as for a view."""

    def query(self, queries: Queries, name: str) -> sql.Composed:
        """Compose one of the queries ``source_…`` for this table."""
        text = cast("Any", queries[name].as_string(None))
        return sql.SQL(text).format(
            table=sql.Identifier(*self.table.split(".", 1)),
            key=sql.Identifier(self.key),
            # The type comes from the server's catalogue, which quotes it if needed.
            type=sql.SQL(cast("Any", self.type)),
        )


def find_source(
    connection: psycopg.Connection[Any], queries: Queries, entity: Entity
) -> Source:
    """Find the table and key column of an entity.

    Raises:
        ReexportError: there is no such table or column in this database.
    """
    name = sql.Identifier(*entity.source.split(".", 1)).as_string(connection)
    row = connection.execute(
        queries["find_source"], {"table": name, "key": entity.key}
    ).fetchone()
    if row is None:
        raise ReexportError(
            f"the entity {entity.name!r} says that its states lie in the table "
            f"{entity.source!r} under the key column {entity.key!r}, but the database "
            "has no such table or column: correct `source` and `key` of @app.entity, "
            "or write the table as schema.table"
        )
    type_, not_null, unique, known, rows = row
    return Source(
        entity.source, entity.key, type_, not not_null, unique, rows if known else None
    )
