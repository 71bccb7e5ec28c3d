"""The chunk job: write the outbox rows of some keys, while the outbox has room."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import ReexportError
from jobs_lib.jobs.job import Discard, Job, RateLimited, Snooze
from jobs_lib.partitioner import choose_shard

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    import psycopg

    from jobs_lib.postgres.queries import Queries

CHUNK_TYPE = "jobs_lib.reexport"
"""The type of the chunk jobs; their handler takes ``reexport`` and ``keys``."""
STALE_TYPE = "jobs_lib.reexport.stale"
"""The type of chunk jobs whose keys have versions. An executor of an older release does
not know it, and leaves these jobs to others."""
OUTBOX_SECONDS = 10
"""Seconds of the rate that may wait in the outbox. They are few, so that a change of
the rate, a pause or a cancel takes effect at once and live rows find a short table."""
OUTBOX_ROWS = 50_000
"""Rows that may wait at most, at any rate: they are counted each time."""
_COUNT_EVERY = 0.5
_SHORTEST_SNOOZE = 0.5
_CANCELLED_SECONDS = 60.0
_WOKEN = 5_000
_LONGEST_DELAY = 10.0 * 366 * 86_400
"""Some keys at one a minute would last longer than dates do."""


@dataclass(slots=True)
class _Room:
    """The outbox's room when it was counted last, shared by a process's threads."""

    until: float
    """When to count again, by the monotonic clock."""
    rows: int
    """Rows that may still be written until then; below zero while paused."""
    left: int
    """Keys that are loaded and not yet sent."""
    rate: int
    measured: float | None
    """The records of the last minute; None if that is not known yet."""


class ChunkExporter:
    """Handles the chunk jobs of one schema; used by many threads at once."""

    def __init__(self, queries: Callable[[], Queries]) -> None:
        self._queries = queries
        self._lock = threading.Lock()
        self._rooms: dict[tuple[object, int], _Room] = {}

    def export(
        self,
        job: Job,
        reexport: int,
        keys: list[str],
        versions: list[int | None] | None = None,
    ) -> None:
        """Write id-only outbox rows for the keys, in the job's own transaction.

        A key that is gone when its row leaves becomes a tombstone of its version.

        Rows and completion commit together, so every key is written once. A chunk of a
        cancelled re-export completes without writing.

        Raises:
            RateLimited: the outbox holds as many rows as the rate allows.
            Snooze: the re-export is paused.
        """
        known = (job.installation, reexport)
        if room := self._full(known, len(keys)):
            raise _snooze(room)
        with job.transaction() as connection:
            self._write(connection, known, reexport, keys, versions)

    def _full(self, known: tuple[object, int], wanted: int) -> _Room | None:
        # Without SQL: while the outbox is full, most jobs are refused here.
        with self._lock:
            room = self._rooms.get(known)
            if room is None or time.monotonic() >= room.until:
                return None
            return room if room.rows < wanted else None

    def _write(
        self,
        connection: psycopg.Connection[Any],
        known: tuple[object, int],
        reexport: int,
        keys: list[str],
        versions: list[int | None] | None,
    ) -> None:
        queries = self._queries()
        this = {"reexport": reexport}
        found = connection.execute(
            queries["read_reexport"], this, prepare=True
        ).fetchone()
        if found is None:
            raise Discard(f"the re-export {reexport} is no longer in the table")
        entity, topic, state, rate, left, shards, measured = found
        if state in ("cancelled", "finished"):
            return
        with self._lock:
            room = self._rooms.get(known)
            if room is None or time.monotonic() >= room.until or state == "paused":
                allowed = allowed_rows(rate, len(keys))
                rows = -1
                if state != "paused":
                    rows = allowed - count_rows(connection, queries, reexport, allowed)
                until = time.monotonic() + _COUNT_EVERY
                room = _Room(until, rows, left, rate, measured)
                if len(self._rooms) > 100:
                    self._rooms.clear()
                self._rooms[known] = room
            if room.rows < len(keys):
                raise _snooze(room)
            room.rows -= len(keys)
        shards_of = [choose_shard(topic, key, shards) for key in keys]
        connection.execute(
            queries["export_keys"],
            {
                **this,
                "topic": topic,
                "entity": entity,
                "shards": shards_of,
                "keys": keys,
                "versions": versions or [None] * len(keys),
            },
            prepare=True,
        )


def allowed_rows(rate: int, chunk: int) -> int:
    """Return the rows that may wait in the outbox at this rate (records/minute)."""
    # At least two chunks: one is sent while the next one is written.
    return max(2 * chunk, min(OUTBOX_ROWS, rate * OUTBOX_SECONDS // 60))


def snooze_bound(left: int, rate: int, measured: float | None = None) -> float:
    """Return the longest sleep of a chunk job, with ``left`` keys before the end.

    It is a quarter of the time that is left. So about eight sleeping jobs wake up for
    each one that may write, however many there are. A change that makes the end come
    sooner must wake them: see :func:`wake_chunks`.

    Args:
        left: the keys.
        rate: records a minute.
        measured: the records of the last minute. If the relays cannot reach the rate,
            the end comes later. But they may be faster soon, as after a pause: then the
            rows in the outbox last until jobs wake up.
    """
    seconds = left * 60 / rate / 4
    if measured is not None and measured < rate:
        later = left * 60 / measured / 4 if measured else _LONGEST_DELAY
        seconds = max(seconds, min(later, OUTBOX_SECONDS))
    return min(_LONGEST_DELAY, max(2 * _SHORTEST_SNOOZE, seconds))


def choose_due(left: int, rate: int, chunk: int, now: datetime) -> datetime | None:
    """Choose when chunk jobs are due that are loaded with ``left`` keys before them.

    None: at once. Jobs that would only find no room need not all be tried in the first
    minutes, beside live jobs.
    """
    if left <= allowed_rows(rate, chunk):
        return None
    seconds = random.uniform(_SHORTEST_SNOOZE, snooze_bound(left, rate))
    return now + timedelta(seconds=seconds)


def wake_chunks(
    connection: psycopg.Connection[Any],
    queries: Queries,
    reexport: int,
    seconds: float = _CANCELLED_SECONDS,
    *,
    failed: bool = True,
) -> None:
    """Let the chunk jobs that sleep for longer wake up within some seconds.

    They had been put off by a rate that is no longer, or of a re-export that was
    cancelled, whose jobs end when they wake up.

    Args:
        connection: in autocommit mode.
        queries: for the library's schema.
        reexport: its id.
        seconds: how long a job may sleep from now on.
        failed: whether jobs that have failed are tried again as soon.
    """
    values = {
        "types": [CHUNK_TYPE, STALE_TYPE],
        "reexport": reexport,
        "seconds": seconds,
        "limit": _WOKEN,
        "failed": failed,
    }
    found = _WOKEN
    while found == _WOKEN:
        found = connection.execute(queries["wake_chunks"], values).rowcount


def chunk_handler(
    queries: Callable[[], Queries],
) -> Callable[[Job, int, list[str]], None]:
    """Make the handler of :data:`CHUNK_TYPE` for one schema, to register as a job."""
    exporter = ChunkExporter(queries)

    def export_chunk(job: Job, reexport: int, keys: list[str]) -> None:
        """Write the outbox rows of some keys of a re-export."""
        exporter.export(job, reexport, keys)

    return export_chunk


def stale_handler(
    queries: Callable[[], Queries],
) -> Callable[[Job, int, list[str], list[int | None]], None]:
    """Make the handler of :data:`STALE_TYPE` for one schema, to register as a job."""
    exporter = ChunkExporter(queries)

    def export_stale(
        job: Job, reexport: int, keys: list[str], versions: list[int | None]
    ) -> None:
        """Write the outbox rows of some keys that only the topic has."""
        exporter.export(job, reexport, keys, versions)

    return export_stale


def _snooze(room: _Room) -> Snooze:
    bound = snooze_bound(room.left, room.rate, room.measured)
    seconds = random.uniform(_SHORTEST_SNOOZE, bound)
    if room.rows < 0:
        return Snooze(seconds, "the re-export is paused")
    return RateLimited(
        seconds,
        f"the re-export sends {room.rate:,} records a minute, and the outbox holds "
        "enough of them",
    )


def count_rows(
    connection: psycopg.Connection[Any], queries: Queries, reexport: int, limit: int
) -> int:
    """Count the rows of a re-export in the outbox, up to a limit."""
    row = connection.execute(
        queries["count_batch_rows"],
        {"reexport": reexport, "limit": limit},
        prepare=True,
    ).fetchone()
    if row is None:
        raise ReexportError("the outbox could not be counted: no row came back")
    return int(row[0])
