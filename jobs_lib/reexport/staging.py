"""Re-exports whose states are staged: they come from elsewhere, with their versions.

    states of a range ─▶ one transaction: staged states, chunk jobs, range loaded
          ─▶ chunk_handler ─▶ id-only outbox rows ─▶ relay, which reads the states

The relay drops a state if a version as new has left live meanwhile. For that it notes
what leaves, from the commit of :func:`begin_staged` on. So what the topic has must be
read after that, and given to :func:`stage_range` without what it supersedes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg.errors import LockNotAvailable, UndefinedTable

from jobs_lib.errors import ReexportError
from jobs_lib.outbox.staged import OF_FRAME
from jobs_lib.partitioner import choose_partitions
from jobs_lib.reexport.control import read_progress
from jobs_lib.reexport.loading import (
    Loading,
    encode_chunks,
    lock_range,
    spell_range,
    telling_full_disk,
)
from jobs_lib.reexport.run import (
    Begun,
    change_rate,
    check_asked,
    find_unfinished,
    read_home,
    set_lag_limit,
    settle_rate,
    store_ranges,
)
from jobs_lib.reexport.source import refuse_other_source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    import psycopg

    from jobs_lib.outbox.topic import Entity
    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.reexport.control import LagLimit
    from jobs_lib.reexport.plan import Range
    from jobs_lib.reexport.window import Window

_STATEMENT_MS, _LOCK_MS = "60000", "200"
"""Limits for dropping states: relays wait for the lock, too."""
_TYPES = ["int8", "text", "int8", "bytea", "text"]


class State(NamedTuple):
    """A state that is ready to be sent."""

    key: str
    version: int
    value: bytes
    content_type: str | None
    """Of topics whose rows say it themselves; None for others."""


def begin_staged(
    database: Database,
    entity: Entity,
    ranges: Sequence[Range],
    *,
    rate: int | Window,
    chunk: int,
    watch_lag: LagLimit | None = None,
) -> Begun:
    """Store a re-export whose states will be staged, or find the unfinished one.

    From its commit on, relays note the versions that leave live.

    Args:
        database: holds the library's schema.
        entity: what ``@app.entity`` declared.
        ranges: how the keys are divided, if none is unfinished.
        rate: as for :func:`jobs_lib.reexport.start`.
        chunk: keys in one job.
        watch_lag: as for :func:`jobs_lib.reexport.start`.

    Raises:
        ReexportError: it cannot be begun as asked; or the unfinished one has another
            kind of source.
    """
    check_asked(rate, chunk, watch_lag)
    queries = database.queries
    with database.connect("re-export") as connection:
        unfinished = find_unfinished(connection, queries, entity.name)
        with connection.transaction():
            topic, partitions = read_home(connection, queries)
            if unfinished is None:
                per_minute = settle_rate(rate, sum(piece.keys for piece in ranges))
                number, started_at = _store(
                    connection, queries, entity, ranges, per_minute
                )
            else:
                number, started_at, *_ = unfinished
                refuse_other_source(connection, queries, number, OF_FRAME)
                progress = read_progress(connection, queries, number)
                change_rate(connection, queries, progress, rate)
            set_lag_limit(connection, queries, number, watch_lag)
    loading = Loading(number, started_at, None, chunk, topic, partitions)
    return Begun(number, unfinished is not None, loading)


def _store(
    connection: psycopg.Connection[Any],
    queries: Queries,
    entity: Entity,
    ranges: Sequence[Range],
    rate: int,
) -> tuple[int, datetime]:
    """Store a new one; returns its id and the time of its start."""
    values = {"entity": entity.name, "topic": entity.topic.name, "rate": rate}
    copies = connection.execute(queries["find_copies"]).fetchall()
    if fed := [copy for topic, copy, _ in copies if topic == entity.topic.name]:
        raise ReexportError(
            f"the topic {entity.topic.name!r} feeds {fed[0]!r}, which gets the table's "
            "states only: end that with `jobs-lib reexport switch` first"
        )
    row = connection.execute(queries["start_frame"], values).fetchone()
    if row is None:
        raise ReexportError(
            f"another re-export of {entity.name!r} has just begun: start again to go "
            "on with it"
        )
    number, started_at = row
    store_ranges(connection, queries, number, ranges)
    connection.execute(queries["make_states"], {"reexport": number})
    return number, started_at


def stage_range(
    connection: psycopg.Connection[Any],
    queries: Queries,
    loading: Loading,
    number: int,
    states: Sequence[State],
    left_out: int = 0,
    choose: Callable[[Sequence[str], int], Sequence[int]] = choose_partitions,
) -> int | None:
    """Load one range; returns the number of keys, or None if there was nothing to do.

    One transaction, under a lock on the range's row, writes the states and the jobs and
    marks the range as loaded. So each key is staged once, no matter how often a range
    is loaded, how many loaders try it at once, and where one dies.

    Args:
        connection: in autocommit mode, to the database of the library's schema.
        queries: for the library's schema.
        loading: the parameters.
        number: the range's number.
        states: one for each key, the newest.
        left_out: keys that are not among the states, since the topic has them.
        choose: chooses the partitions of many keys as a producer does.

    Raises:
        ReexportError: there is no such range, or no such re-export any more; or the
            database's disk is full.
    """
    this: dict[str, Any] = {"reexport": loading.reexport, "range": number}
    with telling_full_disk(spell_range(loading, number)), connection.transaction():
        found = lock_range(connection, queries, loading, number)
        if found is None:
            return None
        keys = [one.key for one in states]
        partitions = choose(keys, loading.partitions)
        with connection.cursor() as cursor:
            with cursor.copy(queries["copy_states"]) as copy:
                copy.set_types(_TYPES)
                for one in states:
                    copy.write_row((loading.reexport, *one))
            with cursor.copy(queries["copy_jobs"]) as copy:
                for block in encode_chunks(loading, keys, partitions, found.due):
                    copy.write(block)
        this |= {"keys": len(keys) + left_out, "left_out": left_out}
        connection.execute(queries["mark_range_loaded"], this)
        # Last, because all loaders and the relay share this row: the lock is short.
        connection.execute(queries["lock_reexport"], this)
        connection.execute(queries["count_staged_range"], this)
    return len(keys) + left_out


def drop_ended(database: Database) -> list[int]:
    """Drop the states of re-exports that have ended; return the ids of these.

    Several processes may do it at once. States that somebody reads now are left for the
    next call.
    """
    dropped = []
    with database.connect_for_upkeep() as connection:
        rows = connection.execute(
            database.queries["list_ended_states"], {"schema": database.schema}
        ).fetchall()
        for (reexport,) in rows:
            # The disk gets its space even if the second step must wait.
            with suppress(LockNotAvailable, UndefinedTable):
                for step in ("empty_states", "drop_states"):
                    _drop(connection, database.queries, step, reexport)
                dropped.append(int(reexport))
    return dropped


def _drop(
    connection: psycopg.Connection[Any], queries: Queries, step: str, reexport: int
) -> None:
    limits = {"statement_ms": _STATEMENT_MS, "lock_ms": _LOCK_MS}
    with connection.transaction():
        connection.execute(queries["bound_statements"], limits)
        connection.execute(queries[step], {"reexport": reexport})
