"""Read what each place knows of one key: its table, the outbox, and the consumers."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import psycopg
from confluent_kafka import KafkaException
from psycopg import sql

from jobs_lib.consuming import versions
from jobs_lib.consuming.keys import GivenKey, KnownKey
from jobs_lib.errors import (
    ConfigurationError,
    JobsError,
    OperatingError,
    PayloadError,
    TopicError,
)
from jobs_lib.operating.session import bounded
from jobs_lib.outbox.keys import split_key
from jobs_lib.postgres.values import identify
from jobs_lib.reasons import find_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.outbox.topic import Entity
    from jobs_lib.postgres.database import Database

    Connection = psycopg.Connection[Any]

COUNTED = 10_000
"""Counts of rows stop at this number."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unknown:
    """What could not be read."""

    reason: str
    is_missing: bool = False
    """Whether a server has answered, and has no such topic."""


class KeyPlace(NamedTuple):
    """Where the newest record of a key is, as far as is known."""

    topic: str
    partition: int | None
    key: str
    offset: int | None
    topic_id: UUID | None


class Owner(NamedTuple):
    """The process that owns an origin."""

    pod: str | None
    """None if no process owns it."""
    heartbeat: datetime | None
    is_alive: bool
    since: datetime | None
    """When the origin was taken, or released; None if nobody ever had it."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """The row of an entity in the service's own table."""

    table: str
    is_there: bool
    version: int | None
    is_captured: bool | None
    """Whether a trigger captures its changes; None if the table has none."""


@dataclass(frozen=True, slots=True)
class OutboxRows:
    """The rows of a key that are not in Kafka yet."""

    owner: Owner
    """Who sends them."""
    shard: int
    live: int
    oldest: datetime | None
    version: int | None
    before: int
    """Rows of the shard that leave before the first of them."""
    batch: int
    """Those of re-exports, among the next ones of each re-export."""
    batch_oldest: datetime | None
    batch_looked: int
    """How many rows of re-exports were looked at."""
    is_paused: bool
    """Whether that re-export is paused."""
    held: int
    held_id: int | None
    held_oldest: datetime | None
    held_version: int | None
    error: str | None
    """Why the hold keeps them back; None if there is no hold."""
    held_since: datetime | None
    retry_at: datetime | None
    holds_topic: bool | None
    """Whether the hold is one of the whole topic."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How far a consumer is in the partition of the key."""

    group: str
    table: str | None
    """Of a read model; None for handlers."""
    known: KnownKey | Unknown
    """What the read model has of the key."""
    owner: Owner
    next_offset: int | None
    is_of_other_topic: bool
    """Whether that is the offset of an earlier topic of this name."""
    failed_offset: int | None
    failing_since: datetime | None
    failure: str | None
    skip_error: str | None
    """Why it has skipped the newest record of the key; None if it has not."""
    skipped_at: datetime | None


def attempt(read: Callable[[], T]) -> T | Unknown:
    """Call a function; what it cannot reach keeps no other place back.

    Raises:
        ConfigurationError: the settings are wrong.
    """
    try:
        return read()
    except ConfigurationError:
        raise
    except JobsError as error:
        return Unknown(str(error), isinstance(error, TopicError))
    except KafkaException as error:
        return Unknown(f"Kafka refuses: {error.args[0].str()}")
    except psycopg.Error as error:
        # The server's other lines repeat values.
        return Unknown(error.diag.message_primary or find_reason(error))


@contextmanager
def _indexed(connection: Connection, database: Database) -> Iterator[None]:
    """Open a bounded transaction whose statements follow indexes."""
    with bounded(connection, database):
        connection.execute(database.queries["follow_indexes"])
        yield


def read_source(
    connection: Connection, database: Database, entity: Entity, key: str
) -> SourceRow:
    """Read whether the table of an entity has the row, and its version.

    The version is the column that `capture_changes` was given, `version` by default.
    """
    table = identify(entity.source)
    named = {"table": table.as_string(connection)}
    queries = database.queries
    with _indexed(connection, database):
        rows = connection.execute(queries["read_column_types"], named).fetchall()
        triggers = connection.execute(queries["find_capture"], named).fetchall()
    types: dict[str, str] = dict(rows)
    if missing := [one for one in entity.columns if one not in types]:
        raise OperatingError(
            f"there is no table {entity.source} with a column {missing[0]}, or this "
            "role does not see it"
        )
    version, is_captured = _read_trigger(triggers, entity)
    statement = queries.fill(
        "find_source_row",
        table=table,
        is_it=sql.SQL(" and ").join(
            sql.SQL("t.{} = {}::text::{}").format(
                sql.Identifier(column),
                sql.Placeholder(f"part{number}"),
                # As PostgreSQL itself has written it.
                sql.SQL(cast("Any", types[column])),
            )
            for number, column in enumerate(entity.columns)
        ),
        # Without such a column only the row itself counts.
        version=sql.Identifier(version if version in types else entity.columns[0]),
    )
    try:
        parts = split_key(key, len(entity.columns))
        values = {f"part{number}": part for number, part in enumerate(parts)}
        with _indexed(connection, database):
            row = connection.execute(statement, values).fetchone()
    except (psycopg.DataError, PayloadError):
        # The column's type has no such value, or the key is none of these columns.
        row = None
    found = row[0] if row and version in types and type(row[0]) is int else None
    return SourceRow(entity.source, row is not None, found, is_captured)


def _read_trigger(
    triggers: Sequence[tuple[Any, ...]], entity: Entity
) -> tuple[str, bool | None]:
    """The column of the version, and whether a trigger captures changes."""
    for arguments, is_on in triggers:
        # Topic, entity, key and version, each with a zero byte behind it.
        given = bytes(arguments).decode(errors="replace").split("\0")
        if given[1:2] == [entity.name]:
            return (given[3] if len(given) > 4 else "version"), is_on
    return "version", None


def read_outbox(
    connection: Connection,
    database: Database,
    topic: str,
    key: str,
    stale_after: float,
) -> OutboxRows:
    """Read the rows of a key that wait or are held, and who sends them."""
    with _indexed(connection, database):
        row = connection.execute(
            database.queries["find_rows_of_key"],
            {
                "topic": topic,
                "key": key,
                "limit": COUNTED,
                "stale_after": stale_after,
            },
        ).fetchone()
    assert row is not None
    return OutboxRows(Owner(*row[-4:]), *row[:-4])


def read_consumers(
    connection: Connection,
    database: Database,
    declared: Sequence[Subscription],
    place: KeyPlace,
    stale_after: float,
) -> list[Reader]:
    """Read how far the consumers of a topic are in the partition of a key.

    Args:
        connection: to the database.
        database: with the offsets.
        declared: the consumers, all of one topic.
        place: of the newest record of the key.
        stale_after: seconds without a heartbeat after which a process counts as dead.
    """
    versions.place(connection, database.queries, declared)
    with _indexed(connection, database):
        rows = connection.execute(
            database.queries["find_consumers"],
            {
                **place._asdict(),
                "groups": [one.group for one in declared],
                "stale_after": stale_after,
            },
        ).fetchall()
    read = {row[0]: row[1:] for row in rows}
    message = GivenKey(place.topic, place.partition or 0, place.key)
    found = []
    for one in declared:
        row = read[one.group]
        known = attempt(partial(_read_model, connection, database, one, message))
        table = one.tables[0].name if one.tables else None
        owner = Owner(*row[-4:])
        found.append(Reader(one.group, table, known, owner, *row[:-4]))
    return found


def _read_model(
    connection: Connection, database: Database, declared: Subscription, key: GivenKey
) -> KnownKey:
    if declared.model is None:
        return KnownKey()
    with _indexed(connection, database):
        return declared.model.find_key(connection, cast("Any", key))
