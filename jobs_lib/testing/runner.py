"""The one place where the test kit touches how jobs are run.

Everything else in the kit reads and writes by queries of its own.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID, uuid4

from psycopg.rows import class_row, tuple_row

from jobs_lib.callers.drivers import driver_connection
from jobs_lib.errors import JobsError, StoredPayloadError
from jobs_lib.executor.lane import ClaimedJob, Finished, Lane, Outcome, Result
from jobs_lib.executor.running.runner import Runner
from jobs_lib.executor.running.transaction import JobConnections
from jobs_lib.executor.settling.completer import Completer
from jobs_lib.jobs.batch import Item
from jobs_lib.jobs.context import handling
from jobs_lib.jobs.job import Discard, Snooze
from jobs_lib.returned import refuse_lazy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator
    from datetime import datetime

    import psycopg

    from jobs_lib.app import App
    from jobs_lib.callers.caller import Caller
    from jobs_lib.jobs.type import JobType
    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.queries import Queries

T = TypeVar("T")

_FINE = {Result.COMPLETED, Result.COMMITTED, Result.SNOOZED, Result.DISCARDED}


@dataclass(frozen=True, slots=True)
class Row:
    """A job as the queries of the kit return it."""

    id: int
    type: str
    origin: str
    group: str | None
    attempt: int
    """Failed attempts so far."""
    payload: str
    run_at: datetime | None
    enqueued_at: datetime
    headers: dict[str, str] | None
    superseded: bool
    """Whether a newer job replaces it: its type runs last only."""
    wait: float
    """Seconds until it is due."""


class OneByOne:
    """Runs single jobs in the calling thread, and settles each as an executor does."""

    def __init__(
        self, app: App, database: Database, enqueued: dict[int, float]
    ) -> None:
        """Prepare to run.

        Args:
            app: the app of the jobs.
            database: holds the jobs.
            enqueued: when each job was enqueued, by its id, noted at its first run:
                travelling moves the rows' times, and a job's key must stay.
        """
        self._database = database
        self._owner = uuid4()
        self._raised: list[BaseException] = []
        self._lent: psycopg.Connection[Any] | None = None
        self._enqueued = enqueued
        types = {name: self._watched(one) for name, one in app.jobs.items()}
        connections = JobConnections(
            types, database.queries, self._owner, self._lend, self._lend_async
        )
        self._runner = Runner(types, connections, app.middleware)
        self._completer = Completer(self._owner, types)

    def close(self) -> None:
        """Close the connections opened for the handlers."""
        if self._lent is not None:
            self._lent.close()

    def run(
        self, connection: psycopg.Connection[Any], row: Row
    ) -> BaseException | None:
        """Run one job and write its outcome; return the error, if there was one.

        A ``Snooze`` or ``Discard`` that the handler raises is no error.
        """
        job = self._own(connection, row)
        job.enqueued = self._enqueued.setdefault(job.id, job.enqueued)
        self._raised.clear()
        if self._runner.batch_size(job) > 1:
            (outcome,) = self._runner.run_batch([job])
        elif self._runner.is_async(job):
            outcome = _run_to_the_end(self._runner.run_async(job))
        else:
            outcome = self._runner.run(job)
        self._settle(connection, job, outcome)
        if self._raised:
            error = self._raised[0]
            return None if isinstance(error, Snooze | Discard) else error
        # The handler was not even called: the payload does not fit.
        misfit = f"{StoredPayloadError.__name__}: "
        if outcome and (outcome.error or "").startswith(misfit):
            return StoredPayloadError((outcome.error or "").removeprefix(misfit))
        if outcome is None or outcome.result in _FINE:
            return None
        return JobsError(outcome.error)

    def supersede(self, connection: psycopg.Connection[Any], row: Row) -> None:
        """End a job without a run: a newer one replaces it."""
        job = self._own(connection, row)
        self._settle(connection, job, Outcome(job, Result.SUPERSEDED))

    def _own(self, connection: psycopg.Connection[Any], row: Row) -> ClaimedJob:
        """The job, under an epoch of ours."""
        owned = connection.execute(
            self._database.queries["kit_own"],
            {"origin": row.origin, "owner": self._owner},
        ).fetchone()
        epoch = cast("tuple[int]", owned)[0]
        installation = read_installation(connection, self._database.queries)
        return make_job(row, installation, epoch)

    def _settle(
        self,
        connection: psycopg.Connection[Any],
        job: ClaimedJob,
        outcome: Outcome | None,
    ) -> None:
        settlements = self._completer.prepare(
            [job] if outcome is None else [],
            [] if outcome is None else [outcome],
            {job.origin: job.lane.epoch},
        )
        for settlement in settlements:
            written = connection.execute(
                self._database.queries[settlement.query], settlement.parameters
            )
            self._completer.read(settlement, written.fetchall(), again=False)

    def _watched(self, job_type: JobType[Any]) -> JobType[Any]:
        """The type with a handler whose errors are kept: an outcome has their text."""
        function = job_type.function

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                # The runner refuses a result that is work not done.
                return function(*args, **kwargs)
            except BaseException as error:
                self._raised.append(error)
                raise

        @functools.wraps(function)
        async def watched_async(*args: Any, **kwargs: Any) -> Any:
            try:
                return await cast("Any", function(*args, **kwargs))
            except BaseException as error:
                self._raised.append(error)
                raise

        watching = copy.copy(job_type)
        is_async = inspect.iscoroutinefunction(function)
        watching.function = watched_async if is_async else watched
        return watching

    @contextmanager
    def _lend(self) -> Iterator[psycopg.Connection[Any]]:
        # One for all: they run one after the other, and to connect takes a while.
        if self._lent is None or self._lent.closed:
            self._lent = self._database.connect("test handlers")
        yield self._lent

    @asynccontextmanager
    async def _lend_async(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        # Each run has an event loop of its own.
        pool = self._database.async_pool("test handlers", 1)
        async with pool, pool.connection() as connection:
            yield connection


def _run_to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # An async test has a loop in this thread, and a thread has one at a time.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def run_inside(
    job_type: JobType[Any], caller: Caller, job_id: int, queries: Queries
) -> None:
    """Run a job inside the transaction that has just enqueued it, and remove it.

    Its own transaction is a savepoint of the caller's. The caller gets every error of
    the handler except ``Discard`` and ``Snooze``. A snoozed job, and one that is not
    due, stay.

    Raises:
        JobsError: the handler is async, and its coroutine cannot run in here.
    """
    connection = driver_connection(caller)
    with connection.cursor(row_factory=class_row(Row)) as cursor:
        row = cursor.execute(queries["kit_read"], {"id": job_id}).fetchone()
    if row is None:
        return
    if job_type.is_async:
        raise JobsError(
            f"inline() has no event loop, and the handler of {row.type!r} is async: "
            "use drain()"
        )
    job = make_job(row, read_installation(connection, queries))

    @contextmanager
    def savepoint(_: ClaimedJob) -> Iterator[psycopg.Connection[Any]]:
        with connection.transaction():
            yield connection

    job.lend = cast("Any", savepoint)
    try:
        with handling(row.origin):
            values = job_type.payload.decode(row.payload)
            function = cast("Any", job_type.function)
            if job_type.batch > 1:
                item = Item(job, values["payload"])
                left = function([item])
                if item.failure is not None:
                    raise item.failure
            else:
                left = function(job, **values)
            refuse_lazy(left, f"the handler of {row.type!r}")
    except Snooze:
        return
    except Discard:
        pass
    connection.execute(queries["kit_remove"], {"id": job_id})


def read_installation(connection: psycopg.Connection[Any], queries: Queries) -> UUID:
    """The database's identity, a part of every idempotency key."""
    with connection.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(queries["read_installation"]).fetchone()
    return cast("tuple[UUID, int, str]", row)[0]


def make_job(row: Row, installation: UUID, epoch: int = 0) -> ClaimedJob:
    """The job of a row, at its next attempt, in a lane of its own."""
    return ClaimedJob(
        id=row.id,
        type=row.type,
        group=row.group,
        attempt=row.attempt + 1,
        crashes=0,
        priority=0,
        payload=row.payload,
        run_at=row.run_at,
        enqueued=row.enqueued_at.timestamp(),
        headers=row.headers,
        origin=row.origin,
        installation=installation,
        lane=Lane(row.origin, epoch, row.group, 0, installation, Finished()),
    )
