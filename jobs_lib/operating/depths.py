"""Measure how much work waits, at a cost that does not grow with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from psycopg import sql

from jobs_lib.operating.session import STATEMENT_SECONDS, bounded

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import psycopg

    from jobs_lib.postgres.database import Database

_WITHIN = 3 * STATEMENT_SECONDS
"""Seconds without an answer after which the server counts as silent."""
_PAGES = 1_000
"""Pages in the sample of a larger table; its counts are scaled up."""


@dataclass(slots=True)
class Depths:
    """The work that waits; for large tables an estimate from a sample of pages."""

    jobs: dict[tuple[str, str], int] = field(default_factory=dict)
    """Unfinished jobs by type and state, ``available`` or ``scheduled``."""
    oldest_job: float = 0.0
    """Seconds since the oldest job that may run was enqueued or became due."""
    discarded: int = 0
    outbox: int = 0
    """Rows that are not in Kafka yet."""
    oldest_row: float = 0.0
    """Seconds since the oldest of these rows was written."""
    held: int = 0
    """Keys, and rows without a key, that Kafka has refused."""


@dataclass(slots=True)
class Blocked:
    """A partition that stands still at a record."""

    group: str
    topic: str
    partition: int
    offset: int
    seconds: float | None
    """Since it stands still; None if that is not known."""


@dataclass(slots=True)
class Consumed:
    """How consumers get on, by group and topic."""

    ages: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds since the newest record that is applied was appended to its topic."""
    blocked: dict[tuple[str, str], int] = field(default_factory=dict)
    """The partitions that stand still at a record."""
    partitions: list[Blocked] = field(default_factory=list)
    """The hundred of them that have stood still longest."""
    skipped: dict[tuple[str, str], int] = field(default_factory=dict)
    """Records that were skipped; for a large table an estimate."""


def read_consumed(database: Database, groups: Collection[str]) -> Consumed:
    """Read how the consumers of these groups get on, in all processes.

    Args:
        database: has their offsets.
        groups: by their names in Kafka.

    Raises:
        UnavailableError: the database does not answer.
        OperatingError: the role that connects may not read the tables.
    """
    found = Consumed()
    if not groups:
        return found
    given = {"groups": sorted(groups)}
    queries = database.queries
    with (
        database.connect("metrics", answer_within=_WITHIN) as connection,
        bounded(connection, database),
    ):
        rows = connection.execute(queries["measure_offsets"], given).fetchall()
        for group, topic, age, blocked in rows:
            found.blocked[group, topic] = blocked
            found.skipped[group, topic] = 0
            if age is not None:
                # A producer's clock may be ahead.
                found.ages[group, topic] = max(0.0, age)
        rows = connection.execute(queries["list_blocked"], given).fetchall()
        found.partitions = [Blocked(*row) for row in rows]
        sample = _Sample(connection, database)
        for group, topic, count in sample.read("skipped", given):
            found.skipped[group, topic] = round(count * sample.scale)
    return found


def read_depths(database: Database) -> Depths:
    """Read all depths.

    Raises:
        UnavailableError: the database does not answer.
        OperatingError: the role that connects may not read the tables.
    """
    found = Depths()
    with (
        database.connect("metrics", answer_within=_WITHIN) as connection,
        bounded(connection, database),
    ):
        sample = _Sample(connection, database)
        for type_, state, count, age in sample.read("jobs"):
            found.jobs[type_, state] = round(count * sample.scale)
            found.oldest_job = max(found.oldest_job, age or 0.0)
        for (count,) in sample.read("discarded"):
            found.discarded = round(count * sample.scale)
        for count, age in sample.read("outbox"):
            found.outbox = round(count * sample.scale)
            found.oldest_row = max(0.0, age or 0.0)
        for (count,) in sample.read("holds"):
            found.held = round(count * sample.scale)
    return found


class _Sample:
    """Reads a share of each table's pages."""

    def __init__(self, connection: psycopg.Connection[Any], database: Database) -> None:
        self.scale = 1.0
        """The number of rows that each row read stands for."""
        self._connection = connection
        self._queries = database.queries
        schema = sql.Identifier(database.schema).as_string(None)
        pages = connection.execute(self._queries["count_pages"], {"schema": schema})
        self._pages: dict[str, int] = dict(pages.fetchall())

    def read(
        self, table: str, given: Mapping[str, Any] | None = None
    ) -> list[tuple[Any, ...]]:
        """Run the query about a table on a sample of its pages."""
        self.scale = max(1.0, self._pages[table] / _PAGES)
        parameters = {"percent": 100.0 / self.scale, **(given or {})}
        query = self._queries[f"sample_{table}"]
        return self._connection.execute(query, parameters).fetchall()
