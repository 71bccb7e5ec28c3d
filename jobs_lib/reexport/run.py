"""Start a re-export, or continue one that was interrupted."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from jobs_lib.errors import ReexportError
from jobs_lib.outbox.finishing import finish_if_done
from jobs_lib.reexport.control import (
    LagLimit,
    Progress,
    Unfinished,
    check_lag_limit,
    check_rate,
    read_progress,
    read_unfinished,
    wake_for_rate,
)
from jobs_lib.reexport.loading import Loading, SqlEngine
from jobs_lib.reexport.plan import plan_ranges
from jobs_lib.reexport.snapshot import (
    HOLD_SECONDS,
    Hold,
    check_hold,
    check_keys,
    hold_snapshot,
    refuse_lost,
)
from jobs_lib.reexport.source import find_source, refuse_other_source
from jobs_lib.reexport.window import Window, find_rate, find_span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    import psycopg

    from jobs_lib.outbox.topic import Entity, Topic
    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.reexport.plan import Range

CHUNK = 100
"""The default number of keys in one chunk job."""
AHEAD = 2_000_000
"""The default limit of keys that are loaded and not yet sent. The jobs of a billion
keys would crowd the table for a whole night, so the loader waits."""
_LASTS_MINUTES = 5
"""Loaded keys that last no longer than this are too few to wait."""
_PAUSE = 1.0


class Engine(Protocol):
    """Loads ranges: one after the other, or in parallel by Spark."""

    def load(self, database: Database, loading: Loading, ranges: Sequence[int]) -> None:
        """Load those of the ranges that are not loaded yet."""

    def idle(self, seconds: float) -> None:
        """Release what is costly to hold: nothing has been loaded for ``seconds``.

        Called about once a second while nothing is to be loaded.
        """


@dataclass(frozen=True, slots=True)
class Begun:
    """A re-export whose ranges are in the table."""

    id: int
    resumed: bool
    """Whether it had begun before."""
    loading: Loading


@dataclass(frozen=True, slots=True)
class _Asked:
    """What :func:`begin` is asked for."""

    entity: Entity
    topic: Topic[Any] | None
    rate: int | Window
    ranges: int | None
    chunk: int
    watch_lag: LagLimit | None
    hold: Hold | None

    @property
    def goal(self) -> str:
        """The name of the topic that the states go to."""
        return (self.topic or self.entity.topic).name


def start(
    database: Database,
    entity: Entity,
    *,
    rate: int | Window,
    engine: Engine | None = None,
    ranges: int | None = None,
    chunk: int = CHUNK,
    ahead: int = AHEAD,
    watch_lag: LagLimit | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    snapshot: bool = False,
    hold_for: float = HOLD_SECONDS,
) -> Progress:
    """Begin a re-export and load it, or continue one that was interrupted.

    Returns when everything is loaded; executors and relays do the rest. If the entity
    has an unfinished re-export, that one gets the new rate and keeps its ranges.

    Args:
        database: holds the entity's table and the library's schema.
        entity: what ``@app.entity`` declared.
        rate: records a minute at the topic; or the hours of the day in which all keys
            are to be sent, or in what is left of them.
        engine: loads the ranges. Defaults to this process, one range after the other.
        ranges: the number of ranges. Defaults to one for each 20,000 keys, 10,000 at
            most.
        chunk: keys in one job. Defaults to 100.
        ahead: keys that may be loaded and not yet sent; then the call waits until half
            of them are sent. Defaults to two million.
        watch_lag: a group, and the lag above which it pauses the re-export; see
            :func:`jobs_lib.reexport.watch_lag`. Defaults to none, or to that of the
            unfinished one.
        on_progress: called before each wave of ranges and at the end.
        snapshot: load the keys that the table has at one moment. Not for long loads:
            VACUUM cannot remove dead rows meanwhile.
        hold_for: seconds for which the snapshot may be held.

    Raises:
        ReexportError: it cannot be planned or begun as asked.
    """
    hold = Hold(hold_for, ahead) if snapshot else None
    begun = begin(
        database,
        entity,
        rate=rate,
        ranges=ranges,
        chunk=chunk,
        watch_lag=watch_lag,
        hold=hold,
    )
    engine = engine or SqlEngine()
    if hold is None:
        return load(database, begun, engine, ahead, on_progress)
    with hold_snapshot(database, begun, hold.seconds) as held:
        return load(database, held, engine, ahead, on_progress)


def begin(
    database: Database,
    entity: Entity,
    *,
    rate: int | Window,
    ranges: int | None = None,
    chunk: int = CHUNK,
    watch_lag: LagLimit | None = None,
    hold: Hold | None = None,
    topic: Topic[Any] | None = None,
) -> Begun:
    """Plan a re-export and store it, or find the unfinished one and set its rate.

    Args:
        database: holds the entity's table and the library's schema.
        entity: what ``@app.entity`` declared.
        rate: as for :func:`start`.
        ranges: the number of ranges.
        chunk: keys in one job.
        watch_lag: as for :func:`start`.
        hold: refuse what would hold a snapshot for longer.
        topic: where the states go, and all changes from now on, too. Defaults to the
            entity's own topic.

    Raises:
        ReexportError: it cannot be planned or begun as asked.
    """
    check_asked(rate, chunk, watch_lag)
    if hold is not None:
        check_hold(database, hold)
    asked = _Asked(entity, topic, rate, ranges, chunk, watch_lag, hold)
    queries = database.queries
    with database.connect("re-export") as connection:
        # To plan may take long, and would be in vain without one.
        read_home(connection, queries)
        unfinished = find_unfinished(connection, queries, entity.name)
        if unfinished is None:
            begun = _begin_new(connection, queries, asked)
            if begun is not None:
                return begun
            # Another process was faster: continue its re-export.
            unfinished = find_unfinished(connection, queries, entity.name)
        if unfinished is None:
            raise ReexportError(
                f"another re-export of {entity.name!r} began and ended while this one "
                "was planned: start it again"
            )
        return _resume(connection, queries, asked, unfinished)


def _begin_new(
    connection: psycopg.Connection[Any], queries: Queries, asked: _Asked
) -> Begun | None:
    """Plan a re-export and store it; None if another process has begun one."""
    entity = asked.entity
    plan = plan_ranges(connection, queries, entity, asked.ranges)
    if asked.hold is not None:
        check_keys(plan.total, asked.hold)
    with connection.transaction():
        home, partitions = read_home(connection, queries)
        per_minute = settle_rate(asked.rate, plan.total)
        row = connection.execute(
            queries["start_reexport"],
            {"entity": entity.name, "topic": asked.goal, "rate": per_minute},
        ).fetchone()
        if row is None:
            return None
        number, started_at = row
        set_lag_limit(connection, queries, number, asked.watch_lag)
        store_ranges(connection, queries, number, plan.ranges)
        if asked.topic is not None:
            _begin_copy(connection, queries, entity, asked.topic, started_at)
    loading = Loading(number, started_at, plan.source, asked.chunk, home, partitions)
    return Begun(number, False, loading)


def _resume(
    connection: psycopg.Connection[Any],
    queries: Queries,
    asked: _Asked,
    unfinished: Unfinished,
) -> Begun:
    """Go on with an unfinished re-export, at the rate that is asked for."""
    entity, number = asked.entity, unfinished.id
    refuse_other_source(connection, queries, number, "table")
    source = find_source(connection, queries, entity)
    if unfinished.topic != asked.goal:
        raise ReexportError(
            f"the re-export {number} of {entity.name!r} goes to {unfinished.topic!r} "
            "and has not ended: wait for its end, or end it with `jobs-lib reexport "
            f"cancel {entity.name}`"
        )
    if asked.topic is not None:
        _refuse_unfed(connection, queries, entity, asked.topic, number)
    progress = read_progress(connection, queries, number)
    _settle_snapshot(connection, queries, progress, asked.hold)
    change_rate(connection, queries, progress, asked.rate)
    set_lag_limit(connection, queries, number, asked.watch_lag)
    place = read_home(connection, queries)
    loading = Loading(number, unfinished.started_at, source, asked.chunk, *place)
    return Begun(number, True, loading)


def _begin_copy(
    connection: psycopg.Connection[Any],
    queries: Queries,
    entity: Entity,
    topic: Topic[Any],
    started_at: datetime,
) -> None:
    """Feed a topic from now on: no key of the re-export is read before the commit."""
    own = entity.topic.name
    values = {"topic": own, "copy": topic.name, "entity": entity.name}
    row = connection.execute(
        queries["begin_copy"], {**values, "started_at": started_at}
    ).fetchone()
    if row is None:
        raise ReexportError(
            f"{topic.name!r} feeds another topic, or {own!r} is fed from one: end that "
            f"with `jobs-lib reexport switch {entity.name} TOPIC` first"
        )


def _refuse_unfed(
    connection: psycopg.Connection[Any],
    queries: Queries,
    entity: Entity,
    topic: Topic[Any],
    reexport: int,
) -> None:
    values = {"entity": entity.name, "copy": topic.name}
    if connection.execute(queries["lock_copy"], values).fetchone() is None:
        raise ReexportError(
            f"the re-export {reexport} of {entity.name!r} goes to {topic.name!r}, "
            f"which is not fed from {entity.topic.name!r}, so changes would be missing "
            "there: wait for its end, or end it with `jobs-lib reexport cancel "
            f"{entity.name}`"
        )


def load(
    database: Database,
    begun: Begun,
    engine: Engine,
    ahead: int = AHEAD,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Load all ranges that are not loaded, in waves of up to ``ahead`` keys.

    It waits here, outside of the engine, while enough keys are loaded. Returns early
    when the re-export is cancelled meanwhile.
    """
    queries = database.queries
    this = {"reexport": begun.id}
    filling = True
    loaded_at = time.monotonic()
    while True:
        # A new connection each time: a wave may take an hour.
        with database.connect("re-export") as connection:
            progress = read_progress(connection, queries, begun.id)
            pending = connection.execute(queries["pending_ranges"], this).fetchall()
            if not pending:
                # A table without keys is done before any record is sent.
                finish_if_done(connection, queries, begun.id)
                progress = read_progress(connection, queries, begun.id)
        if on_progress is not None:
            on_progress(progress)
        if not pending or progress.ended:
            return progress
        waiting = progress.loaded - progress.sent - progress.superseded
        room = ahead - waiting
        if waiting <= refill_at(ahead, progress.rate) or _count_keys(pending) <= room:
            filling = True
        if filling and (wave := next_wave(pending, room, idle=waiting <= 0)):
            engine.load(database, begun.loading, wave)
            loaded_at = time.monotonic()
        else:
            filling = False
            engine.idle(time.monotonic() - loaded_at)
            time.sleep(_PAUSE)


def refill_at(ahead: int, rate: int) -> int:
    """Return the loaded keys with which loading goes on, at this rate (records/minute).

    It is half of ``ahead``, and not as soon as one more range fits: otherwise an engine
    would be needed again and again for a single range, the whole night. At a high rate
    it is more, so that the keys last until the engine has started again.
    """
    return max(ahead // 2, min(ahead, rate * _LASTS_MINUTES))


def next_wave(
    pending: Sequence[tuple[int, int]], room: int, *, idle: bool
) -> list[int]:
    """Choose ranges ``(number, keys)`` whose keys fit; at least one when idle."""
    wave: list[int] = []
    for number, keys in pending:
        room -= keys
        if room < 0 and not (idle and not wave):
            break
        wave.append(number)
    return wave


def find_unfinished(
    connection: psycopg.Connection[Any], queries: Queries, entity: str
) -> Unfinished | None:
    """Find the entity's unfinished re-export of a table or a frame.

    Raises:
        ReexportError: there is one that sends something else.
    """
    found = read_unfinished(connection, queries, entity)
    if found is None:
        return None
    if found.stale:
        raise ReexportError(
            f"the re-export {found.id} of {entity!r} removes stale keys and has not "
            "ended: wait for its end, or end it with `jobs-lib reexport cancel "
            f"{entity}`"
        )
    if not found.has_ranges:
        if finish_if_done(connection, queries, found.id):
            return None
        raise ReexportError(
            f"the re-export {found.id} of {entity!r} sends changes that transactions "
            "have given to it, and only one of an entity goes on at a time: wait until "
            f"it is finished, or end it by `jobs-lib reexport cancel {entity}`"
        )
    return found


def check_asked(rate: int | Window, chunk: int, watch_lag: LagLimit | None) -> None:
    """Refuse a rate, a size of chunks or a limit of the lag that cannot be.

    Raises:
        ReexportError: one is out of range.
    """
    if isinstance(rate, int):
        check_rate(rate)
    if watch_lag is not None:
        check_lag_limit(watch_lag)
    if not 1 <= chunk <= 10_000:
        raise ReexportError(f"a chunk holds 1 to 10,000 keys, not {chunk}")


def store_ranges(
    connection: psycopg.Connection[Any],
    queries: Queries,
    reexport: int,
    ranges: Sequence[Range],
) -> None:
    """Write the ranges of a re-export that begins."""
    values = {
        "reexport": reexport,
        "lowers": [piece.lower for piece in ranges],
        "uppers": [piece.upper for piece in ranges],
        "keys": [piece.keys for piece in ranges],
    }
    connection.execute(queries["plan_ranges"], values)


def settle_rate(rate: int | Window, keys: int) -> int:
    """Return the records a minute with which so many keys are sent."""
    return rate if isinstance(rate, int) else find_rate(keys, find_span(rate))


def change_rate(
    connection: psycopg.Connection[Any],
    queries: Queries,
    progress: Progress,
    rate: int | Window,
) -> None:
    """Give an unfinished re-export the rate for what is left of it."""
    per_minute = settle_rate(rate, progress.left)
    values = {"reexport": progress.id, "rate": per_minute}
    connection.execute(queries["change_rate"], values)
    wake_for_rate(connection, queries, replace(progress, rate=per_minute))


def set_lag_limit(
    connection: psycopg.Connection[Any],
    queries: Queries,
    reexport: int,
    limit: LagLimit | None,
) -> None:
    """Set the lag that pauses a re-export; None leaves it as it is."""
    if limit is not None:
        values = {"group": limit.group, "records": limit.records}
        connection.execute(
            queries["change_lag_limit"], {"reexport": reexport, **values}
        )


def _settle_snapshot(
    connection: psycopg.Connection[Any],
    queries: Queries,
    progress: Progress,
    hold: Hold | None,
) -> None:
    """Refuse a snapshot of the rest of a table, or note that the rest has none."""
    if hold is None:
        connection.execute(queries["lose_snapshot"], {"reexport": progress.id})
        return
    check_keys(progress.total, hold)
    if 0 < progress.loaded_ranges < progress.ranges:
        raise refuse_lost(progress.id, progress.loaded_ranges)


def _count_keys(pending: Sequence[tuple[int, int]]) -> int:
    return sum(keys for _, keys in pending)


def read_home(connection: psycopg.Connection[Any], queries: Queries) -> tuple[str, int]:
    """Read the home topic and its number of partitions, which stays in a transaction.

    Raises:
        ReexportError: none is declared.
    """
    row = connection.execute(queries["read_home"]).fetchone()
    if row is None:
        raise ReexportError(
            "no home topic is declared, so the chunk jobs would have no owner: "
            "run `jobs-lib topics declare MODULE:APP TOPIC --partitions N --home`"
        )
    return str(row[0]), int(row[1])
