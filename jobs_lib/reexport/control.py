"""Pause, resume or cancel a re-export, change its rate, and read its progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs_lib.errors import ReexportError
from jobs_lib.outbox.finishing import finish_if_done
from jobs_lib.reasons import count_bytes
from jobs_lib.reexport.chunks import count_rows, snooze_bound, wake_chunks

if TYPE_CHECKING:
    from datetime import datetime

    import psycopg

    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.queries import Queries

RATE_LIMIT = 10_000_000
REACHED = 0.975
"""The share of its rate that a long re-export reaches: see ``take_records``."""
LAG_LIMIT = 10**15
_NAME_BYTES = 249
_DIGITS = 20
"""Of a limit, at most: Python reads no number of thousands of digits."""
_WITHIN = 120.0
"""Seconds without an answer after which a connection counts as lost: some statements
wait for a block that is written, or wake up many jobs."""


class LagLimit(NamedTuple):
    """How far a group may be behind while a re-export goes on.

    Attributes:
        group: its name in Kafka.
        records: from its offsets up to the ends of the topic's partitions.
    """

    group: str
    records: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a re-export."""

    id: int
    entity: str
    state: str
    """``loading``, ``running``, ``paused``, ``cancelled`` or ``finished``."""
    rate: int
    """Records a minute."""
    total: int
    """All keys, and the rows that transactions have given to it; ranges that are not
    loaded yet count as planned."""
    sent: int
    superseded: int
    """Keys that were not sent because a newer live record was waiting."""
    ranges: int
    loaded_ranges: int
    started_at: datetime
    eta: datetime | None
    """When it ends at this rate, or at the measured one if that is lower, by the
    database's clock; None if it does not run, or has sent nothing for a minute."""
    finished_at: datetime | None
    loaded: int
    """Keys whose chunk jobs are in the table, or done."""
    lag_group: str | None = None
    """The group whose lag pauses it; None: no group's."""
    lag_limit: int | None = None
    """The lag above which it is paused; at half of it, it goes on."""
    lag: int | None = None
    """The group's lag when a relay last asked Kafka; None: not known yet."""
    lagging: bool = False
    """Whether it is paused because of that lag, and not by :func:`pause`."""
    measured: int | None = None
    """Records a minute, as they were sent in the last minute, or since the first one
    was sent; None if that is too short to tell, or if it has ended."""
    snapshot: bool | None = None
    """Whether the loaded keys are those of one moment; None: nobody asked for that."""
    stale: bool = False
    """Whether it sends the keys that only the topic has, and not those of the table."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will be sent."""
        return self.state in ("cancelled", "finished")

    @property
    def left(self) -> int:
        """Keys that must still be sent."""
        return max(0, self.total - self.sent - self.superseded)


class Unfinished(NamedTuple):
    """A re-export that has not ended; each entity has one at most."""

    id: int
    started_at: datetime
    stale: bool
    """Whether it sends the keys that only the topic has, and not those of the table."""
    topic: str
    """The one that it goes to, by its name in Kafka."""
    has_ranges: bool
    """Whether its keys are divided into ranges; those of stale keys have one once the
    keys are loaded, and the changes of transactions have none."""


def status(database: Database, entity: str) -> Progress:
    """Read the progress of the entity's latest re-export; marks it as ended if it is.

    Raises:
        ReexportError: the entity was never re-exported.
    """
    with database.connect("re-export", answer_within=_WITHIN) as connection:
        latest = find_latest(connection, database.queries, entity)
        finish_if_done(connection, database.queries, latest)
        return read_progress(connection, database.queries, latest)


def list_latest(database: Database, limit: int = 50) -> list[Progress]:
    """List the latest re-exports of all entities, newest first.

    Args:
        database: holds the library's schema.
        limit: how many at most.
    """
    with database.connect("re-export", answer_within=_WITHIN) as connection:
        query = database.queries["list_reexports"]
        rows = connection.execute(query, {"limit": limit}).fetchall()
    return [Progress(*row) for row in rows]


def pause(database: Database, entity: str) -> Progress:
    """Stop sending records until :func:`resume`; loading goes on.

    It also ends a pause because of a group's lag, which would end by itself.
    """
    return _change(database, entity, "pause_reexport")


def resume(database: Database, entity: str) -> Progress:
    """Go on after :func:`pause`, at the same rate and without a burst."""
    return _change(database, entity, "resume_reexport")


def cancel(database: Database, entity: str) -> Progress:
    """End it for good: unsent records are never sent. This cannot be undone."""
    with database.connect("re-export", answer_within=_WITHIN) as connection:
        progress = _change_on(connection, database.queries, entity, "cancel_reexport")
        # They end when they wake up, and should not lie there until then.
        wake_chunks(connection, database.queries, progress.id)
    return progress


def set_rate(database: Database, entity: str, rate: int) -> Progress:
    """Change the rate, in records a minute, from now on.

    Raises:
        ReexportError: the rate is out of range, or no re-export is running.
    """
    queries, values = database.queries, {"rate": check_rate(rate)}
    with database.connect("re-export", answer_within=_WITHIN) as connection:
        progress = _change_on(connection, queries, entity, "change_rate", **values)
        wake_for_rate(connection, queries, progress)
    return progress


def wake_for_rate(
    connection: psycopg.Connection[Any], queries: Queries, progress: Progress
) -> None:
    """Wake up jobs that would sleep for too long at the rate that it has now."""
    bound = snooze_bound(_count_left(progress), progress.rate)
    wake_chunks(connection, queries, progress.id, bound)


def _count_left(progress: Progress) -> int:
    """Count the keys that are loaded and not yet sent."""
    return progress.loaded - progress.sent - progress.superseded


def watch_lag(database: Database, entity: str, limit: LagLimit | None) -> Progress:
    """Pause while a group that reads the topic is too far behind, from now on.

    A relay asks Kafka every few seconds. Above the limit it pauses the re-export, and
    at half of the limit it lets it go on. :func:`pause` still pauses it until
    :func:`resume`.

    Args:
        database: holds the library's schema.
        entity: by its name.
        limit: the group and its limit; None to pause no more because of it.

    Raises:
        ReexportError: no re-export is running.
    """
    group, records = limit or (None, None)
    return _change(database, entity, "change_lag_limit", group=group, records=records)


def parse_lag_limit(text: str) -> LagLimit:
    """Parse a limit such as ``search:10000``.

    Raises:
        ReexportError: it is none.
    """
    group, _, records = text.rpartition(":")
    # `isdecimal` takes the digits of every script.
    if records.isascii() and records.isdecimal() and len(records) <= _DIGITS:
        return check_lag_limit(LagLimit(group, int(records)))
    raise ReexportError(
        "a limit of the lag is GROUP:RECORDS, such as search:10000, not "
        f"{text[:_NAME_BYTES]!r}"
    )


def check_lag_limit(limit: LagLimit) -> LagLimit:
    """Return the limit if it is valid.

    Raises:
        ReexportError: no group has this name, or the number is out of range.
    """
    group, records = limit
    if not 1 <= count_bytes(group) <= _NAME_BYTES or "\0" in group:
        raise ReexportError(
            f"name the group whose lag pauses the re-export, in 1 to {_NAME_BYTES} "
            f"bytes of UTF-8, not {group[:_NAME_BYTES]!r}: `jobs-lib reexport plan` "
            "lists those that read the topic"
        )
    if not 1 <= records <= LAG_LIMIT:
        raise ReexportError(
            f"the lag's limit must be 1 to {LAG_LIMIT:,} records, not {records}"
        )
    return limit


def check_rate(rate: int) -> int:
    """Return the rate, in records a minute, if it is valid.

    Raises:
        ReexportError: the rate is out of range.
    """
    if not 1 <= rate <= RATE_LIMIT:
        raise ReexportError(
            f"the rate must be 1 to {RATE_LIMIT:,} records a minute, not {rate}: to "
            "send nothing, pause the re-export"
        )
    return rate


def finish_open(database: Database) -> None:
    """Mark all re-exports as ended that are done, whoever sent their last record.

    The relay that sends the last record does so, too. But there is no last record after
    the last transaction that gave rows to a re-export was rolled back.

    Those that are not done go on, even if all of their jobs sleep for too long, and no
    job of one that was cancelled sleeps for long.
    """
    queries = database.queries
    with database.connect_for_upkeep() as connection:
        for (reexport,) in connection.execute(queries["list_open"]).fetchall():
            if not finish_if_done(connection, queries, reexport):
                _wake_forgotten(connection, queries, reexport)
        # A loader may have committed jobs since the cancel, or a job may have been put
        # to sleep. Or the process ended that was to wake them.
        for (reexport,) in connection.execute(queries["list_cancelled"]).fetchall():
            wake_chunks(connection, queries, reexport)


def _wake_forgotten(
    connection: psycopg.Connection[Any], queries: Queries, reexport: int
) -> None:
    """Wake up jobs that sleep for a rate that is no longer, if no other has rows left.

    They were put to sleep, or committed by their loader, after others had been woken
    up for the new rate. Or the process ended that was to wake them, or the server's
    clock was set back.
    """
    if count_rows(connection, queries, reexport, 1):
        return
    progress = read_progress(connection, queries, reexport)
    if left := _count_left(progress):
        # One that has failed waits for its next try.
        bound = snooze_bound(left, progress.rate)
        wake_chunks(connection, queries, reexport, bound, failed=False)


def find_latest(
    connection: psycopg.Connection[Any], queries: Queries, entity: str
) -> int:
    """Find the id of the entity's latest re-export.

    Raises:
        ReexportError: there is none.
    """
    row = connection.execute(queries["find_latest"], {"entity": entity}).fetchone()
    if row is None:
        raise ReexportError(
            f"the entity {entity!r} was never re-exported: "
            f"`jobs-lib reexport start {entity} --rate N` begins one"
        )
    return int(row[0])


def read_unfinished(
    connection: psycopg.Connection[Any], queries: Queries, entity: str
) -> Unfinished | None:
    """Read which re-export of an entity has not ended, whatever it sends."""
    row = connection.execute(queries["find_unfinished"], {"entity": entity}).fetchone()
    return None if row is None else Unfinished(*row)


def read_progress(
    connection: psycopg.Connection[Any], queries: Queries, reexport: int
) -> Progress:
    """Read the progress of one re-export.

    Raises:
        ReexportError: there is none with this id.
    """
    row = connection.execute(
        queries["reexport_progress"], {"reexport": reexport}
    ).fetchone()
    if row is None:
        raise ReexportError(f"there is no re-export {reexport}: was it deleted?")
    return Progress(*row)


def _change(database: Database, entity: str, query: str, **values: object) -> Progress:
    with database.connect("re-export", answer_within=_WITHIN) as connection:
        return _change_on(connection, database.queries, entity, query, **values)


def _change_on(
    connection: psycopg.Connection[Any],
    queries: Queries,
    entity: str,
    query: str,
    **values: object,
) -> Progress:
    latest = find_latest(connection, queries, entity)
    parameters = {"reexport": latest, **values}
    changed = connection.execute(queries[query], parameters).fetchone()
    progress = read_progress(connection, queries, latest)
    if changed is None:
        raise ReexportError(
            f"the re-export {latest} of {entity!r} is {progress.state}, so there is "
            f"nothing to change: `jobs-lib reexport start {entity} --rate N` begins a "
            "new one"
        )
    return progress
