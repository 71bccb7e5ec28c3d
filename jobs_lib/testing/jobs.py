"""The jobs of a test: see waiting ones, run them, and move the clock."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, Self, cast
from unittest.mock import patch

import psycopg
from psycopg.rows import class_row

from jobs_lib.consuming.handler import call_async
from jobs_lib.consuming.handler_loop import HANDLER_LOOP
from jobs_lib.jobs.context import handling
from jobs_lib.jobs.type import JobType
from jobs_lib.naming import make_template
from jobs_lib.operating import retry
from jobs_lib.postgres.database import Database, settle_isolation
from jobs_lib.postgres.migrate import migrate
from jobs_lib.settings import default_settings, load_settings
from jobs_lib.testing.enqueued import (
    Enqueued,
    check_fields,
    describe,
    list_up,
    read_payload,
)
from jobs_lib.testing.locks import check_locks
from jobs_lib.testing.runner import OneByOne, Row, run_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import datetime

    from jobs_lib.app import App
    from jobs_lib.callers.caller import Caller
    from jobs_lib.consuming.record import Record
    from jobs_lib.settings import Settings

    Connection = psycopg.Connection[Any]

_NONE = object()


class Jobs:
    """The jobs of an app in the database of one test.

    While it is in use, as a context manager, the app writes to that database.

    Args:
        app: the app under test.
        url: of the database.
        locked: whether to fail a ``send`` whose transaction has not locked the entity.
    """

    def __init__(self, app: App, url: str, *, locked: bool = True) -> None:
        self.app = app
        self.url = url
        self.errors: list[BaseException] = []
        """The errors that handlers raised in :meth:`drain`, in order."""
        self._locked = locked
        self._enqueued: dict[int, float] = {}
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        given = self.app._settings
        settings = (given or load_settings()).model_copy(
            # Everything that would use the service's servers uses the test's instead.
            update={
                "database_url": self.url,
                "direct_url": "",
                "pgbouncer": False,
                "schema_registry_url": "mock://tests",
            }
        )
        if given is not None and _find_tables(given) != _find_tables(load_settings()):
            # The database was made by the environment's settings. An app that was given
            # its own may have another schema, or another environment. Otherwise the
            # tables are there, and this role may not be their owner.
            migrate(self.url, settings.schema_name, settings)
        self._database = Database.of(settings)
        self._connection = self._opened.enter_context(
            self._database.connect("test kit")
        )
        self._use(settings)
        self._opened.callback(self._use, given)
        # No Kafka says here how far other groups are, so no job waits for them.
        self.app._enqueuer.checks_places = False
        self._opened.callback(setattr, self.app._enqueuer, "checks_places", True)
        if self._locked:
            self._opened.enter_context(check_locks())
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def connect(self) -> Connection:
        """A psycopg connection to the test's database, closed at the test's end."""
        connection = self._connect()
        self._opened.callback(connection.close)
        return connection

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A connection whose transaction is committed at the end of the block."""
        with self._connect() as connection:
            yield connection

    def handle(
        self, handler: Callable[..., Any], record: Record[Any, Any] | Sequence[Record]
    ) -> None:
        """Call a consumer's handler as a consumer does, and commit.

        Args:
            handler: the handler; an async one gets an event loop of its own.
            record: what it gets; for a handler per block, a list of records.
        """
        first = record if not isinstance(record, Sequence) else record[0]
        with self.transaction() as connection, handling(first.origin):
            if not inspect.iscoroutinefunction(handler):
                handler(record, connection)
                return
            # A transaction must be open, as in a consumer.
            connection.execute("select 1")
            HANDLER_LOOP.open()
            try:
                call_async(handler, record, connection)
            finally:
                HANDLER_LOOP.close()

    def enqueued(
        self, job_type: JobType[...] | None = None, /, **payload: Any
    ) -> list[Enqueued]:
        """The waiting jobs, in the order of enqueue: all, or those of one type.

        Args:
            job_type: the result of ``@app.job``.
            **payload: only jobs with these values; other fields do not matter.
        """
        if job_type is not None:
            check_fields(job_type, payload)
        return [
            one
            for one in self._list()
            if (job_type is None or one.type == job_type.name)
            and all(
                one.payload.get(name, _NONE) == value for name, value in payload.items()
            )
        ]

    def assert_enqueued(self, job_type: JobType[...], /, **payload: Any) -> Enqueued:
        """Fail unless a job of the type, with these values, waits; the first one."""
        __tracebackhide__ = True
        found = self.enqueued(job_type, **payload)
        if not found:
            raise AssertionError(
                f"no job {describe(job_type.name, payload)} is enqueued; "
                f"{list_up(self.enqueued())}\n(only what is committed can be seen)"
            )
        return found[0]

    def assert_not_enqueued(self, job_type: JobType[...], /, **payload: Any) -> None:
        """Fail if a job of the type, with these values, waits."""
        __tracebackhide__ = True
        if found := self.enqueued(job_type, **payload):
            raise AssertionError(
                f"no job {describe(job_type.name, payload)} should be enqueued, but "
                f"{list_up(found)}"
            )

    def drain(
        self,
        *,
        until: datetime | None = None,
        include_future: bool = False,
        raises: bool = True,
        limit: int = 1_000,
    ) -> int:
        """Run due jobs in this thread until none is left; return how many ran.

        They run one by one, in the order of enqueue, and so do the jobs that they
        enqueue. Paused jobs, jobs behind one of their group that is not due, and jobs
        of types that the app does not have stay where they are. A newer job of its type
        supersedes a job that runs last only, which does not count; no debounce is
        waited for.

        Args:
            until: run what becomes due until that time, too, each job at its time:
                the clock is moved on (see :meth:`travel`), to ``until`` in the end.
            include_future: run everything, whenever it is due, in the same way.
            raises: end with the first error that a handler raises. Its job is retried
                later, as ever. Otherwise errors are only kept in ``errors``.
            limit: fail when more than this number run: jobs may enqueue jobs for ever.
        """
        left = float("inf") if include_future else 0.0
        if until is not None:
            left = max(0.0, (until - self._now()).total_seconds())
        ran = 0
        with closing(OneByOne(self.app, self._database, self._enqueued)) as runner:
            while (row := self._next()) is not None and row.wait <= left:
                if row.wait:
                    self.travel(row.wait)
                    left -= row.wait
                    continue
                if row.superseded:
                    runner.supersede(self._connection, row)
                    continue
                if ran == limit:
                    raise AssertionError(
                        f"{limit} jobs have run and {list_up(self.enqueued())}: does "
                        "a job enqueue itself for ever? Else give a higher limit"
                    )
                ran += 1
                error = runner.run(self._connection, row)
                if error is not None:
                    attempt = row.attempt + 1
                    error.add_note(f"in job {row.id} {row.type!r}, attempt {attempt}")
                    self.errors.append(error)
                    if raises:
                        raise error
        if until is not None:
            self.travel(left)
        return ran

    def travel(self, seconds: float) -> None:
        """Set the clock of scheduled jobs forward by these seconds.

        The database's own clock stays as it is: the times of all waiting jobs move
        instead. This runs no job.
        """
        if seconds < 0:
            raise ValueError(f"time goes forward only, not by {seconds:g} s")
        self.query("kit_travel", seconds=seconds)

    def retry(self, *ids: int) -> int:
        """Make failed jobs due now, as ``jobs-lib jobs retry`` does; return how many.

        Args:
            *ids: jobs that wait for their time or another attempt, or were discarded.
                Defaults to all that have failed.

        Raises:
            AssertionError: one of these cannot be retried; the message says why.
        """
        __tracebackhide__ = True
        done = retry(self._database, ids or None)
        if done.left or done.conflicts:
            reasons = [f"job {job}: {why.text}" for job, why in done.left.items()]
            reasons += [
                f"job {job}: another job has its unique key" for job in done.conflicts
            ]
            raise AssertionError("not retried are\n  " + "\n  ".join(reasons))
        return done.retried

    @contextmanager
    def inline(self) -> Iterator[None]:
        """Inside the block, each enqueued job runs at once, before the call returns.

        The job is enqueued with all checks; then its handler runs in the caller's
        transaction, and the job is removed. The handler's own transaction is a
        savepoint of the caller's, and the caller gets the handler's errors. A job for
        later is only enqueued, and a snoozed one stays. There are no attempts and no
        order: test those, and async handlers, with :meth:`drain`.
        """
        enqueue = JobType.enqueue

        def enqueue_and_run(
            job_type: JobType[Any], conn: Caller, /, *args: Any, **kwargs: Any
        ) -> int:
            job_id = enqueue(job_type, conn, *args, **kwargs)
            ours = self.app.jobs.get(job_type.name)
            if ours is not None and ours.function is job_type.function:
                run_inside(job_type, conn, job_id, self._database.queries)
            return job_id

        def enqueue_and_run_many(
            job_type: JobType[Any], conn: Caller, payloads: Iterable[Mapping[str, Any]]
        ) -> int:
            return len([enqueue_and_run(job_type, conn, **one) for one in payloads])

        with (
            patch.object(JobType, "enqueue", enqueue_and_run),
            patch.object(JobType, "enqueue_many", enqueue_and_run_many),
        ):
            yield

    def query(self, name: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """The rows of one of the library's named queries."""
        cursor = self._connection.execute(self._database.queries[name], parameters)
        return cursor.fetchall() if cursor.description else []

    def _connect(self) -> Connection:
        connection = psycopg.connect(self.url)
        settle_isolation(connection, stays=True)
        return connection

    def _next(self) -> Row | None:
        types = self.app.jobs
        asked = {
            "types": list(types),
            "last_types": [name for name, one in types.items() if one.last_only],
        }
        with self._connection.cursor(row_factory=class_row(Row)) as cursor:
            return cursor.execute(self._database.queries["kit_next"], asked).fetchone()

    def _list(self) -> Iterator[Enqueued]:
        for job_id, type_, group, attempt, text, run_at in self.query("kit_list"):
            known = self.app.jobs.get(type_)
            payload = read_payload(known, text) if known else json.loads(text)
            yield Enqueued(job_id, type_, payload, group, run_at, attempt)

    def _now(self) -> datetime:
        return cast("datetime", self.query("read_clock")[0][0])

    def _use(self, settings: Settings | None) -> None:
        # What is open, and the ids of schemas, belong to the servers before.
        self.app.close()
        self.app._found_registry = None
        for one in self.app.written:
            one.encoder.forget()
        self.app._settings = settings
        # Code that reads the environment itself must read it again.
        default_settings.cache_clear()


def _find_tables(settings: Settings) -> tuple[str, str, str]:
    """Say where the tables lie, and how their environment names topics."""
    return settings.schema_name, settings.environment, make_template(settings)
