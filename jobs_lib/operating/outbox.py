"""The outbox for operators: list waiting and held rows, retry holds, drop rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import OperatingError
from jobs_lib.operating.session import bounded
from jobs_lib.outbox.copies import Copies
from jobs_lib.outbox.finishing import finish_if_done

if TYPE_CHECKING:
    from datetime import datetime

    from jobs_lib.postgres.database import Database

COUNTED = 10_000
"""The count of a shard's or a hold's rows stops at this number."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Rows of one topic that are not in Kafka yet."""

    topic: str
    kind: str
    """``live``, ``batch`` (of a re-export) or ``held``."""
    rows: int
    """At most :data:`COUNTED` for each shard."""
    oldest: datetime
    """When the oldest of these rows was written."""


@dataclass(frozen=True, slots=True)
class Held:
    """Rows that wait because Kafka refused the first one, or its state did not load."""

    topic: str
    key: str | None
    """None for a whole topic, or a row without a key."""
    row: int | None
    """The id of a row without a key."""
    rows: int
    """How many rows wait: :data:`COUNTED` at most."""
    error: str
    """The last error."""
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
    """None for a tombstone, or if the state is read when the row leaves."""
    headers: dict[str, str] | None = field(repr=False)
    version: int | None
    entity: str | None
    """The entity whose state is read when the row leaves."""
    reexport: int | None
    written_at: datetime
    error: str | None
    """Why it is held."""


def list_waiting(database: Database) -> list[Waiting]:
    """List rows that are not in Kafka yet, by topic.

    Raises:
        UnavailableError: the database does not answer.
        OperatingError: the query took too long.
    """
    rows = _ask(database, "outbox_status", {"limit": COUNTED})
    return [Waiting(*row) for row in rows]


def list_holds(database: Database) -> list[Held]:
    """List holds, the oldest first; :data:`COUNTED` at most."""
    rows = _ask(database, "list_holds", {"limit": COUNTED})
    return [
        Held(topic, key, row, waiting, error, attempts, since, retry_at)
        for topic, key, row, error, attempts, since, retry_at, waiting in rows
    ]


def show_row(database: Database, row: int) -> Row | None:
    """Show one row; None if there is none: it was sent, or never committed."""
    rows = _ask(database, "show_row", {"id": row})
    return Row(*rows[0]) if rows else None


def retry_holds(
    database: Database, topic: str | None = None, key: str | None = None
) -> int:
    """Try holds now; returns how many.

    The relay sends the first row of each hold. If Kafka takes it, the others follow in
    their order.

    Args:
        database: where the outbox is.
        topic: only holds of this topic.
        key: only the hold of this key.
    """
    return len(_ask(database, "retry_holds", {"topic": topic, "key": key}))


def drop_row(database: Database, row: int) -> None:
    """Delete a held row for good; the rows behind it are tried.

    Its record never reaches its topic. If that one feeds another, the key's state is
    sent there all the same, so that the new topic lacks no change of the table.

    Raises:
        OperatingError: the row is not held; nothing was changed.
    """
    with database.connect("outbox") as connection, bounded(connection, database):
        found = connection.execute(database.queries["drop_row"], {"id": row}).fetchone()
        if found is None:
            raise OperatingError(
                f"row {row} of the outbox is not held, so it is not dropped: "
                "`jobs-lib outbox status` shows the holds"
            )
        topic, key, version, is_change, reexport = found
        if is_change:
            Copies(database).write_dropped(connection, topic, key, version)
        connection.execute(database.queries["end_idle_holds"])
        if reexport is not None:
            finish_if_done(connection, database.queries, reexport)


def _ask(
    database: Database, query: str, parameters: dict[str, Any]
) -> list[tuple[Any, ...]]:
    with database.connect("outbox") as connection, bounded(connection, database):
        return connection.execute(database.queries[query], parameters).fetchall()
