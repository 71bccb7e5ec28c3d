"""The outbox: what waits in it, what is held and why, and what can be done about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import OperatingError
from jobs_lib.operating.session import bounded

if TYPE_CHECKING:
    from datetime import datetime

    from jobs_lib.postgres.database import Database

COUNTED = 10_000
"""No more than so many rows of a shard, or of a hold, are counted."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Rows of one topic that are not in Kafka yet."""

    topic: str
    kind: str
    """``live``, ``batch`` (of a re-export) or ``held``."""
    rows: int
    """:data:`COUNTED` for each shard at the most."""
    oldest: datetime
    """When the oldest of them was written."""


@dataclass(frozen=True, slots=True)
class Held:
    """Rows that wait because Kafka, or what loads their state, refused the first."""

    topic: str
    key: str | None
    """None for a whole topic, or a row without a key."""
    row: int | None
    """The row without a key."""
    rows: int
    """How many wait: :data:`COUNTED` at the most."""
    error: str
    """The last one."""
    attempts: int
    since: datetime
    retry_at: datetime
    """When the first of the rows is tried again."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the outbox."""

    id: int
    shard: int
    kind: str
    topic: str
    key: str | None
    value: bytes | None = field(repr=False)
    """None for a tombstone, or where the state is read when it leaves."""
    headers: dict[str, str] | None = field(repr=False)
    version: int | None
    entity: str | None
    """Whose state is read when it leaves."""
    reexport: int | None
    written_at: datetime
    error: str | None
    """Why it is held."""


def list_waiting(database: Database) -> list[Waiting]:
    """What is not in Kafka yet, by topic.

    Raises:
        UnavailableError: the database does not answer.
        OperatingError: it took too long.
    """
    rows = _ask(database, "outbox_status", {"limit": COUNTED})
    return [Waiting(*row) for row in rows]


def list_holds(database: Database) -> list[Held]:
    """What is held, the oldest first; :data:`COUNTED` at the most."""
    rows = _ask(database, "list_holds", {"limit": COUNTED})
    return [
        Held(topic, key, row, waiting, error, attempts, since, retry_at)
        for topic, key, row, error, attempts, since, retry_at, waiting in rows
    ]


def show_row(database: Database, row: int) -> Row | None:
    """One row, or None if there is none of that id: it was sent, or never committed."""
    rows = _ask(database, "show_row", {"id": row})
    return Row(*rows[0]) if rows else None


def retry_holds(
    database: Database, topic: str | None = None, key: str | None = None
) -> int:
    """Try what is held now; returns how many holds.

    The relay sends the first row of each; when that gets through the others follow in
    their order.

    Args:
        database: where the outbox is.
        topic: only of this one.
        key: only this one.
    """
    return len(_ask(database, "retry_holds", {"topic": topic, "key": key}))


def drop_row(database: Database, row: int) -> None:
    """Delete a held row for good; what waits behind it is tried.

    Raises:
        OperatingError: it is not held; nothing was changed.
    """
    with database.connect("outbox") as connection, bounded(connection, database):
        found = connection.execute(database.queries["drop_row"], {"id": row})
        if not found.rowcount:
            raise OperatingError(
                f"row {row} of the outbox is not held, so it is not dropped: "
                "`jobs-lib outbox status` shows what is held"
            )
        connection.execute(database.queries["end_idle_holds"])


def _ask(
    database: Database, query: str, parameters: dict[str, Any]
) -> list[tuple[Any, ...]]:
    with database.connect("outbox") as connection, bounded(connection, database):
        return connection.execute(database.queries[query], parameters).fetchall()
