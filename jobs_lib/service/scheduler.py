"""The scheduler: enqueue each tick of the schedules once, over all pods.

Every pod runs one. All wake at a tick; the first one to update the schedule's row
enqueues in the same transaction, and the others find the row updated. A pod's own clock
decides nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol, cast

from jobs_lib import telemetry
from jobs_lib.loop import Loop
from jobs_lib.postgres.database import plain_errors

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator
    from datetime import datetime

    import psycopg

    from jobs_lib.jobs.schedule import Schedule
    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.queries import Queries

# The database's clock may be set, and a failed tick is tried again.
_LONGEST_WAIT = 10.0
_LAST_SECONDS = 5.0
"""Seconds that a stop waits for a tick: middleware of the application may hang."""
_PATIENCE = 2.0
"""Seconds for which the schedules of one look wait for locks, all together."""
_LEAST_PATIENCE = 0.1
"""Seconds for each after that: there may be many that wait in vain."""


class Clock(Protocol):
    """Says what time it is, and waits."""

    def now(self, connection: psycopg.Connection[Any]) -> datetime:
        """The time, with a time zone."""

    def wait(self, stopping: threading.Event, seconds: float) -> None:
        """Return after about ``seconds``, or when ``stopping`` is set."""


class DatabaseClock:
    """The database's clock; a monotonic clock counts the seconds of a wait."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries

    def now(self, connection: psycopg.Connection[Any]) -> datetime:
        """Ask the database for its time."""
        row = connection.execute(self._queries["read_clock"]).fetchone()
        return cast("tuple[datetime]", row)[0]

    def wait(self, stopping: threading.Event, seconds: float) -> None:
        """Wait for ``stopping``, at most ``seconds``."""
        stopping.wait(seconds)


class Scheduler:
    """A thread that enqueues the jobs of the schedules."""

    def __init__(
        self,
        database: Database,
        schedules: Iterable[Schedule],
        *,
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._queries = database.queries
        self._schedules = list(schedules)
        self._clock = clock or DatabaseClock(database.queries)
        self._registered = False
        self._loop = Loop("scheduler", self._work)

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def stop(self) -> None:
        """Stop the thread, and wait a moment for the jobs that it is enqueueing.

        What it has not committed by then, another pod enqueues.
        """
        self._loop.stop(_LAST_SECONDS)

    def _work(self) -> Iterator[None]:
        stopping = self._loop.stopping
        with self._database.connect(self._loop.name, impatient=True) as connection:
            while not stopping.is_set():
                seconds = self._enqueue_due(connection)
                yield
                self._clock.wait(stopping, min(seconds, _LONGEST_WAIT))

    def _enqueue_due(self, connection: psycopg.Connection[Any]) -> float:
        """Enqueue the due jobs; return the seconds until the next tick."""
        now = self._clock.now(connection)
        if not self._registered:
            # Once per process: during a rollout, pods with the old expression and pods
            # with the new one must not overwrite each other in turn.
            for schedule in self._schedules:
                self._register(connection, schedule, now)
            self._registered = True
        rows = connection.execute(
            self._queries["read_schedules"],
            {"names": [schedule.name for schedule in self._schedules]},
        )
        ticked = dict(rows.fetchall())
        patience = _PATIENCE
        for schedule in [*self._schedules]:
            after = ticked.get(schedule.name)
            if after is None:
                # Somebody deleted the row: it counts as a new schedule.
                self._register(connection, schedule, now)
                continue
            began = time.monotonic()
            wait = max(patience, _LEAST_PATIENCE)
            if not self._tick_patiently(connection, schedule, after, now, wait):
                patience -= time.monotonic() - began
                if wait > _LEAST_PATIENCE >= patience:
                    # It has waited for long: next time the others go before it.
                    self._put_last(schedule)
        following = min(schedule.next(now) for schedule in self._schedules)
        return (following - now).total_seconds()

    def _register(
        self, connection: psycopg.Connection[Any], schedule: Schedule, now: datetime
    ) -> None:
        connection.execute(
            self._queries["register_schedule"],
            {
                "name": schedule.name,
                "definition": schedule.definition,
                "now": now,
            },
        )

    def _tick_patiently(
        self,
        connection: psycopg.Connection[Any],
        schedule: Schedule,
        after: datetime,
        now: datetime,
        wait: float,
    ) -> bool:
        """If one cannot be enqueued, try it again without delaying the others.

        Returns whether it could be; a statement waits ``wait`` seconds for a lock.
        """
        try:
            self._tick(connection, schedule, after, now, wait)
        # The application's middleware may fail.
        except BaseException as error:
            if connection.closed:
                # This schedule may be the reason: next time the others go first.
                self._put_last(schedule)
                raise
            telemetry.emit("loop.failed", loop=f"schedule {schedule.name}", error=error)
            return False
        return True

    def _put_last(self, schedule: Schedule) -> None:
        self._schedules.remove(schedule)
        self._schedules.append(schedule)

    def _tick(
        self,
        connection: psycopg.Connection[Any],
        schedule: Schedule,
        after: datetime,
        now: datetime,
        wait: float,
    ) -> None:
        due = schedule.choose(after, now)
        if due.until is None:
            return
        with connection.transaction(), plain_errors():
            connection.execute(
                self._queries["limit_waiting"], {"wait": f"{wait * 1_000:.0f}ms"}
            )
            moved = connection.execute(
                self._queries["move_schedule"],
                {"name": schedule.name, "ticked_at": after, "until": due.until},
            )
            if not moved.rowcount:
                return
            for tick in due.ticks:
                schedule.job_type.enqueue(connection, **schedule.payload(tick))
        if due.ticks:
            telemetry.emit(
                "ticks.enqueued", schedule=schedule.name, ticks=list(due.ticks)
            )
        if due.dropped:
            since, before = due.dropped
            telemetry.emit(
                "ticks.dropped", schedule=schedule.name, since=since, before=before
            )
