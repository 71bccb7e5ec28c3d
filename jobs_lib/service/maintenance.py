"""The upkeep that every service does now and then, in a thread of its own.

It creates and drops the history's days, ends re-exports of which nothing is left, drops
the staged states of those that have ended, deletes keys that have been gone for long,
entities that answers need no more, old requests and the places that ended jobs had,
lifts holds without rows, and reports transactions that have been open for long: until
they end, the dead rows of all other transactions pile up.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib import telemetry
from jobs_lib.backoff import Retry
from jobs_lib.errors import UnavailableError
from jobs_lib.loop import Loop
from jobs_lib.operating.checks import Limits
from jobs_lib.operating.history import maintain
from jobs_lib.postgres.database import is_lost
from jobs_lib.reexport.control import finish_open
from jobs_lib.reexport.staging import drop_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jobs_lib.consuming.read_model import ReadModel
    from jobs_lib.postgres.database import Database

_HOUR = 3_600.0
_MINUTE = 60.0
_JITTER = 0.1
_GONE_DAYS = 30
"""Much longer than a compacted topic keeps deleted keys."""
_ROWS = 10_000
_LAST_SECONDS = 5.0
"""Seconds that a stop waits for a step; PostgreSQL may not answer."""
# A fault that may last, such as a missing privilege, needs no retry each second.
_AFTER_FAILURE = Retry(first=5.0, cap=_HOUR)


class Maintenance:
    """Calls :func:`maintain` at once and then every hour, give or take a tenth.

    Args:
        database: has the history.
        keep: for how many days finished jobs are kept, over all types.
        interval: seconds between two looks for old transactions.
        limits: the age from which a transaction is old. Defaults to ``Limits()``.
        models: the read models of this service.
        answer_seconds: for how long an entity is kept for answers at least.
        request_seconds: for how long the id of a request is remembered at least.
    """

    def __init__(
        self,
        database: Database,
        keep: Iterable[int],
        *,
        interval: float = _MINUTE,
        limits: Limits | None = None,
        models: Iterable[ReadModel] = (),
        answer_seconds: float = 300.0,
        request_seconds: float = 86_400.0,
    ) -> None:
        self._database = database
        self._keep = frozenset(keep)
        self._interval = interval
        self._limits = limits or Limits()
        self._models = tuple(models)
        self._answer_seconds = answer_seconds
        self._request_seconds = request_seconds
        self._maintain_at = 0.0
        self._failures = 0
        """How often the hourly steps have failed in a row."""
        self._loop = Loop("maintenance", self._work, retry=_AFTER_FAILURE)

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def stop(self) -> None:
        """Stop the thread, and wait a moment for its current step."""
        # What the step does not end now, it undoes, or another process does it again.
        self._loop.stop(_LAST_SECONDS)

    def _work(self) -> Iterator[None]:
        database, forget = self._database, self._forget
        each_minute: list[Callable[[], object]] = [
            self._report_old_transactions,
            partial(finish_open, database),
            partial(drop_ended, database),
        ]
        each_hour: list[Callable[[], object]] = [
            partial(maintain, database, self._keep),
            partial(forget, "forget_gone_keys", {"days": _GONE_DAYS}),
            partial(forget, "forget_expired", {"seconds": self._answer_seconds}),
            partial(forget, "forget_requests", {"seconds": self._request_seconds}),
            partial(forget, "forget_versions", {}),
            *(partial(self._forget_reached, model) for model in self._models),
            self._forget_places,
            self._end_idle_holds,
        ]
        while not self._loop.stopping.is_set():
            errors = list(self._try_each(each_minute))
            if time.monotonic() >= self._maintain_at:
                self._note_hourly(list(self._try_each(each_hour)))
            if errors:
                raise errors[0]
            yield
            left = max(0.0, self._maintain_at - time.monotonic())
            self._loop.stopping.wait(min(left, _vary(self._interval)))

    def _note_hourly(self, errors: list[Exception]) -> None:
        """Note what failed: it is tried again apart from what each minute has."""
        if errors:
            self._failures += 1
            delay = _AFTER_FAILURE.delay(self._failures)
            telemetry.emit("loop.failed", loop=self._loop.name, error=errors[0])
        else:
            self._failures, delay = 0, _vary(_HOUR)
        self._maintain_at = time.monotonic() + delay

    def _try_each(self, steps: Iterable[Callable[[], object]]) -> Iterator[Exception]:
        """Do all steps; yields the errors of those that fail.

        A fault of one may last, such as a read model's table that lacks its key.
        """
        for step in steps:
            if self._loop.stopping.is_set():
                return
            try:
                step()
            except Exception as error:
                if _is_away(error):
                    raise  # The others would wait as long.
                yield error

    def _forget(self, name: str, values: dict[str, Any]) -> None:
        """Delete rows in batches, by a query that counts those that it deletes."""
        query = self._database.queries[name]
        with self._database.connect_for_upkeep() as connection:
            forgotten = _ROWS
            while forgotten == _ROWS and not self._loop.stopping.is_set():
                row = connection.execute(query, {**values, "rows": _ROWS}).fetchone()
                forgotten = row[0] if row else 0

    def _forget_reached(self, model: ReadModel) -> None:
        with self._database.connect_for_upkeep() as connection:
            model.forget_reached(connection)

    def _forget_places(self) -> None:
        """Delete the kept places of jobs that have ended, some jobs at a time."""
        query = self._database.queries["forget_places"]
        with self._database.connect_for_upkeep() as connection:
            after: int | None = 0
            while after is not None and not self._loop.stopping.is_set():
                row = connection.execute(
                    query, {"after": after, "rows": _ROWS}
                ).fetchone()
                after = row[0] if row else None

    def _end_idle_holds(self) -> None:
        """Lift holds without rows: a relay that dies before it does so leaves them."""
        with self._database.connect_for_upkeep() as connection:
            connection.execute(self._database.queries["end_idle_holds"])

    def _report_old_transactions(self) -> None:
        with self._database.connect_for_upkeep() as connection:
            found = connection.execute(
                self._database.queries["check_transactions"]
            ).fetchall()
        for kind, seconds, who, application, state in found:
            if seconds >= self._limits.old_transaction:
                telemetry.emit(
                    "transaction.old",
                    kind=kind,
                    who=who,
                    application=application,
                    state=state,
                    seconds=seconds,
                )


def _is_away(error: Exception) -> bool:
    """Whether the database does not answer, or no longer."""
    if isinstance(error, psycopg.OperationalError):
        return is_lost(error.sqlstate)
    return isinstance(error, UnavailableError)


def _vary(seconds: float) -> float:
    """A random time near this one: pods that start together must spread the work."""
    return seconds * random.uniform(1 - _JITTER, 1 + _JITTER)
