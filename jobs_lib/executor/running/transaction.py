"""The job's own transaction: its effect commits together with the completion."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import pq

from jobs_lib.errors import (
    FencedError,
    JobsError,
    UnavailableError,
    UnknownCommitError,
)
from jobs_lib.executor.claiming.in_flight import name_rows
from jobs_lib.executor.running.forked import count_forks, end_if_forked
from jobs_lib.executor.running.loans import Loans
from jobs_lib.executor.running.own_time import OwnTime
from jobs_lib.jobs.context import current_place
from jobs_lib.masking import spell
from jobs_lib.ownership.role import EXECUTE
from jobs_lib.postgres.database import BEGIN, fenced
from jobs_lib.postgres.session import answered_within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from types import TracebackType
    from uuid import UUID

    from jobs_lib.executor.lane import ClaimedJob
    from jobs_lib.jobs.type import JobType
    from jobs_lib.postgres.queries import Queries

    Borrow = Callable[[], AbstractContextManager[psycopg.Connection[Any]]]
    BorrowAsync = Callable[
        [], AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]
    ]


_BEGIN = BEGIN.encode()


class JobConnections:
    """Lends connections to handlers, and completes jobs on them; for many threads."""

    def __init__(
        self,
        types: Mapping[str, JobType[Any]],
        queries: Queries,
        owner: UUID,
        borrow: Borrow,
        borrow_async: BorrowAsync | None = None,
        answer_within: float | None = None,
        *,
        keeps_server: bool = True,
        role: str = EXECUTE,
        loans: Loans | None = None,
    ) -> None:
        """Prepare to lend.

        Args:
            types: the handlers, by the name of their type.
            queries: for the schema.
            owner: the process that owns the origins.
            borrow: gives a connection, and takes it back.
            borrow_async: the same on the event loop.
            answer_within: seconds that the server has to answer our own statements.
            keeps_server: whether a connection always leads to the same server.
            role: the role in which the process owns the origins.
            loans: ends the connections of jobs whose time is over.
        """
        self.loans = loans or Loans()
        self.forks = count_forks()
        self.borrow = borrow
        self._borrow_async = borrow_async
        self._types = types
        self.queries = queries
        self._owner = owner
        self._role = role
        self.answer_within = answer_within
        self._keeps_server = keeps_server
        asking = b"; " + queries["read_server"].as_bytes(None)
        self._begin_on_server = _BEGIN + asking
        self._completion = queries["complete_own"].as_bytes(None)

    def lend(self, job: ClaimedJob) -> OwnTransaction:
        """Make the transaction of a job."""
        return OwnTransaction(self, job)

    @contextmanager
    def ask(self, what: str, done: str) -> Iterator[psycopg.Connection[Any]]:
        """Give a connection for a query of our own, before the handler begins.

        Args:
            what: what the query asks for, such as ``payload``, for the error.
            done: what is done with it, such as ``read``, for the error.

        Raises:
            UnavailableError: there is no connection, or no answer in time.
        """
        with (
            own_statement(None, done, what=what),
            self.borrow() as connection,
            own_statement(connection, done, self.answer_within, what=what),
        ):
            yield connection

    @property
    def borrow_async(self) -> BorrowAsync:
        """Lends connections on the event loop."""
        if self._borrow_async is None:
            raise JobsError(
                "no asynchronous transaction here: use `with job.transaction()`"
            )
        return self._borrow_async

    def opening(self, connection: Any, job: ClaimedJob) -> bytes:
        """Make the text that begins a transaction, and may ask for the server.

        Call it in the job's handler, whose places new jobs get.
        """
        known = self._keeps_server and getattr(connection, "server", None)
        text = _BEGIN if known or not job.lane.server else self._begin_on_server
        if place := current_place():
            # For jobs that it enqueues in SQL. `set` returns no rows.
            value = psycopg.sql.Literal(place).as_bytes(connection)
            text += b"; set local jobs_lib.place to " + value
        return text

    def suspicion(self, connection: Any, job: ClaimedJob) -> dict[str, Any] | None:
        """Name the rows to check before the completion; None if no commit can be lost.

        If another server answers than the one where the job was claimed, commits may be
        lost. Then the job, and the jobs completed with it, must still exist and be the
        first of their group.
        """
        lane = job.lane
        known = not lane.server or connection.server == lane.server
        if known and not job.overtaken:
            return None
        return name_rows([*lane.done, job])

    def completion(self, connection: Any, job: ClaimedJob) -> bytes:
        """Make the text that completes the job, and the jobs that ran before it.

        Those of its group that ran before must not be unfinished when this job's effect
        commits.
        """
        before = job.lane.done
        for done in before:
            done.carried = True
        return self._completion % {
            b"owner": b"'%s'" % str(self._owner).encode(),
            b"origin": psycopg.sql.Literal(job.lane.origin).as_bytes(connection),
            b"epoch": b"%d" % job.lane.epoch,
            b"id": b"%d" % job.id,
            b"attempt": b"%d" % job.attempt,
            b"keep": _literal(self._types[job.type].keep),
            b"before": _array(done.id for done in before),
            b"before_keep": _array(self._types[done.type].keep for done in before),
            b"role": psycopg.sql.Literal(self._role).as_bytes(connection),
        }


class OwnTransaction:
    """A context manager for both ``with`` and ``async with``."""

    def __init__(self, connections: JobConnections, job: ClaimedJob) -> None:
        self._connections = connections
        self._job = job
        self._borrowed: Any = None
        self._connection: Any = None
        self._begun_at = 0.0
        self._is_timed = job.deadline < math.inf

    def __enter__(self) -> psycopg.Connection[Any]:
        with OwnTime(self._job):
            return self._begin()

    def _begin(self) -> psycopg.Connection[Any]:
        self._borrowed = self._connections.borrow()
        with own_statement(None, "asked for"):
            self._connection = connection = self._borrowed.__enter__()
        try:
            with own_statement(connection, "opened", self._connections.answer_within):
                opening = self._connections.opening(connection, self._job)
                opened = connection.execute(opening, prepare=False)
                if opened.nextset() and opened.description:
                    ((connection.server,),) = opened.fetchall()
                self._note_lent()
            self._begun_at = time.monotonic()
        except BaseException as error:
            self._borrowed.__exit__(type(error), error, error.__traceback__)
            raise
        return connection  # type: ignore[no-any-return]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with OwnTime(self._job):
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        end_if_forked(self._connections.forks)
        connection = self._connection
        connection.take_back()
        if self._was_ended():
            self._borrowed.__exit__(None, None, None)
            self._connections.loans.note_returned(connection)
            self._refuse_late(error)
            return
        try:
            if error is None:
                self._check(connection)
                connections = self._connections
                if asked := connections.suspicion(connection, self._job):
                    with own_statement(
                        connection, "checked", connections.answer_within
                    ):
                        query = connections.queries["find_overtaken"]
                        found = connection.execute(query, asked).fetchall()
                    self._refuse_overtaken(found)
                text = connections.completion(connection, self._job)
                with committing(connection, connections.answer_within):
                    connection.execute(text, prepare=False)
                self._note_committed()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None and _is_open(connection):
                with rolling_back(connection, self._connections.answer_within):
                    connection.rollback()
            lost = self._note_lost(error)
            self._borrowed.__exit__(None, None, None)
        if error is not None:
            refuse_lost(lost, error, self._begun_at)

    async def __aenter__(self) -> psycopg.AsyncConnection[Any]:
        with OwnTime(self._job):
            return await self._begin_async()

    async def _begin_async(self) -> psycopg.AsyncConnection[Any]:
        self._borrowed = self._connections.borrow_async()
        with own_statement(None, "asked for"):
            self._connection = connection = await self._borrowed.__aenter__()
        try:
            with own_statement(connection, "opened", self._connections.answer_within):
                opening = self._connections.opening(connection, self._job)
                opened = await connection.execute(opening, prepare=False)
                if opened.nextset() and opened.description:
                    ((connection.server,),) = await opened.fetchall()
                self._note_lent()
            self._begun_at = time.monotonic()
        except BaseException as error:
            await self._borrowed.__aexit__(type(error), error, error.__traceback__)
            raise
        return connection  # type: ignore[no-any-return]

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with OwnTime(self._job):
            await self._end_async(error)

    async def _end_async(self, error: BaseException | None) -> None:
        end_if_forked(self._connections.forks)
        connection = self._connection
        connection.take_back()
        if self._was_ended():
            await self._borrowed.__aexit__(None, None, None)
            self._connections.loans.note_returned(connection)
            self._refuse_late(error)
            return
        try:
            if error is None:
                self._check(connection)
                connections = self._connections
                if asked := connections.suspicion(connection, self._job):
                    with own_statement(
                        connection, "checked", connections.answer_within
                    ):
                        query = connections.queries["find_overtaken"]
                        cursor = await connection.execute(query, asked)
                        found = await cursor.fetchall()
                    self._refuse_overtaken(found)
                text = connections.completion(connection, self._job)
                with committing(connection, connections.answer_within):
                    await connection.execute(text, prepare=False)
                self._note_committed()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None and _is_open(connection):
                with rolling_back(connection, self._connections.answer_within):
                    await connection.rollback()
            lost = self._note_lost(error)
            await self._borrowed.__aexit__(None, None, None)
        if error is not None:
            refuse_lost(lost, error, self._begun_at)

    def _note_lent(self) -> None:
        if self._is_timed and not self._connections.loans.add(
            self._job, self._connection
        ):
            self._refuse_late(None)

    def _was_ended(self) -> bool:
        """Whether the connection was ended, since the job's time is over."""
        if not self._is_timed or self._connections.loans.remove(self._job):
            return False
        # The socket is shut, or will be in a moment: nobody else may get it.
        self._connection.pgconn.finish()
        return True

    def _refuse_late(self, error: BaseException | None) -> None:
        # An error of the handler itself says more.
        if error is None or isinstance(error, psycopg.Error):
            raise FencedError(
                f"refused: the time limit of job {self._job.id} was over, so another "
                "attempt has taken its place. Nothing was changed"
            ) from error

    def _check(self, connection: Any) -> None:
        closed = connection.closed and not connection.broken
        if closed or connection.info.transaction_status == pq.TransactionStatus.IDLE:
            ended = "closed the connection" if closed else "ended the transaction"
            raise JobsError(
                f"the handler of {self._job.type!r} {ended} that it was lent, so job "
                f"{self._job.id} could not be completed with it: leave commit, "
                "rollback and close to the `with job.transaction()` block"
            )

    def _note_lost(self, error: BaseException | None) -> bool:
        """Whether the connection was lost; notes it in an error of our own."""
        lost: bool = self._connection.broken
        if lost and isinstance(error, UnavailableError):
            error.lost_since = self._begun_at
        return lost

    def _refuse_overtaken(self, found: Iterable[tuple[int, bool]]) -> None:
        job = self._job
        # Refuse even if the jobs that came first again have run since: the order is
        # broken.
        if job.overtaken or any(
            replaced or job_id == job.id for job_id, replaced in found
        ):
            raise FencedError(
                f"refused: another server answers than the one that job {job.id} was "
                "claimed on, and it lacks commits: the job is not there, or others of "
                "its group come first again. Nothing was changed"
            )

    def _note_committed(self) -> None:
        lane = self._job.lane
        for done in (*lane.done, self._job):
            done.completed = True
        lane.done.clear()


def _literal(number: int | None) -> bytes:
    return b"null" if number is None else b"%d" % number


def _array(numbers: Iterable[int | None]) -> bytes:
    return b"'{%s}'" % b",".join(map(_literal, numbers))


def _is_open(connection: Any) -> bool:
    status = connection.info.transaction_status
    return status not in (pq.TransactionStatus.UNKNOWN, pq.TransactionStatus.IDLE)


@contextmanager
def own_statement(
    connection: Any,
    done: str,
    answer_within: float | None = None,
    *,
    what: str = "transaction",
) -> Iterator[None]:
    """Mark a statement as our own, not the handler's.

    If it fails, that costs no attempt; and it must be answered in time.
    """
    try:
        if connection is None:
            yield
        else:
            with answered_within(connection, answer_within):
                yield
    except UnavailableError as error:
        error.is_of_job = True
        raise
    except psycopg.Error as error:
        if not is_passing(error):
            raise
        refusal = f"the job's {what} could not be {done}: {spell(error)}"
        ours = UnavailableError(refusal)
        ours.is_of_job = True
        raise ours from error


@contextmanager
def committing(connection: Any, answer_within: float | None) -> Iterator[None]:
    """Mark the commit as our own; if its answer is lost, the outcome is unknown."""
    with own_statement(connection, "committed", answer_within), fenced():
        try:
            yield
        except psycopg.Error as error:
            if not connection.broken:
                raise
            raise UnknownCommitError(
                "the connection was lost while the job's transaction was committed, so "
                "its outcome is unknown here: the job runs again only if nothing was "
                f"committed ({spell(error)})"
            ) from error


@contextmanager
def rolling_back(connection: Any, answer_within: float | None) -> Iterator[None]:
    """Roll back; if that fails, do not hide the error that caused the rollback.

    The driver may have raised an error without noticing that the connection is lost;
    the rollback finds out. A connection that does not answer it counts as lost.
    """
    with suppress(psycopg.Error), answered_within(connection, answer_within):
        yield
    if _is_open(connection):
        connection.pgconn.finish()


def refuse_lost(lost: bool, error: BaseException, since: float) -> None:
    """Raise an UnavailableError if the handler failed because of the database.

    Args:
        lost: whether the connection was lost.
        error: the handler's error.
        since: when the transaction began.
    """
    if isinstance(error, psycopg.Error) and (lost or error.sqlstate in _AWAY):
        what = "the connection was lost" if lost else "the server refused a statement"
        reason = spell(error)
        refusal = UnavailableError(f"{what} inside the job's transaction: {reason}")
        refusal.lost_since = since if lost else -math.inf
        raise refusal from error


def is_passing(error: psycopg.Error) -> bool:
    """Whether an error of our own statement is temporary and not the job's fault.

    An error without a state does not come from the server.
    """
    passing = isinstance(error, psycopg.OperationalError)
    return passing or error.sqlstate is None or error.sqlstate in _AWAY


# Read-only, no room, shutting down: any statement may work later. The driver counts
# some of these as internal errors.
_AWAY = {"25006", "25P03", "53100", "53200", "53300", "57P01", "57P02", "57P03"}
