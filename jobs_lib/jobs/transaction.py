"""The job's own transaction: an effect that commits together with the completion."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import pq

from jobs_lib.db import fenced
from jobs_lib.errors import JobsError, UnavailableError, UnknownCommitError
from jobs_lib.jobs.forked import count_forks, end_if_forked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from types import TracebackType
    from uuid import UUID

    from jobs_lib.db import Queries
    from jobs_lib.jobs.model import Job
    from jobs_lib.jobs.type import JobType

    Borrow = Callable[[], AbstractContextManager[psycopg.Connection[Any]]]
    BorrowAsync = Callable[
        [], AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]
    ]


class Lender:
    """Lends connections to handlers, and completes jobs on them; for many threads."""

    def __init__(
        self,
        types: Mapping[str, JobType[Any]],
        queries: Queries,
        owner: UUID,
        borrow: Borrow,
        borrow_async: BorrowAsync | None = None,
        answer_within: float | None = None,
    ) -> None:
        self.forks = count_forks()
        self.borrow = borrow
        self._borrow_async = borrow_async
        self._types = types
        self.queries = queries
        self._owner = owner
        self.answer_within = answer_within
        """Seconds that the server has to answer our own statements."""
        self._completion = queries["complete_own"].as_bytes(None)

    def lend(self, job: Job) -> Transaction:
        """The transaction of a job."""
        return Transaction(self, job)

    @property
    def borrow_async(self) -> BorrowAsync:
        """Lends connections on the event loop."""
        if self._borrow_async is None:
            raise JobsError(
                "no asynchronous transaction here: use `with job.transaction()`"
            )
        return self._borrow_async

    def completion(self, connection: Any, job: Job) -> bytes:
        """The text that completes the job, and what ran before it in its group.

        What ran before must not be found unfinished after this job's effect is in.
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
        }


class Transaction:
    """A context manager of both kinds: ``with`` and ``async with``."""

    def __init__(self, lender: Lender, job: Job) -> None:
        self._lender = lender
        self._job = job
        self._borrowed: Any = None
        self._connection: Any = None

    def __enter__(self) -> psycopg.Connection[Any]:
        self._borrowed = self._lender.borrow()
        with ours(None, "asked for"):
            self._connection = connection = self._borrowed.__enter__()
        try:
            with ours(connection, "opened", self._lender.answer_within):
                connection.execute("begin", prepare=False)
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
        end_if_forked(self._lender.forks)
        connection = self._connection
        try:
            if error is None:
                self._check(connection)
                text = self._lender.completion(connection, self._job)
                with committing(connection, self._lender.answer_within):
                    connection.execute(text, prepare=False)
                self._note_committed()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None and _is_open(connection):
                with undoing(connection, self._lender.answer_within):
                    connection.rollback()
            lost = connection.broken
            self._borrowed.__exit__(None, None, None)
        if error is not None:
            refuse_lost(lost, error)

    async def __aenter__(self) -> psycopg.AsyncConnection[Any]:
        self._borrowed = self._lender.borrow_async()
        with ours(None, "asked for"):
            self._connection = connection = await self._borrowed.__aenter__()
        try:
            with ours(connection, "opened", self._lender.answer_within):
                await connection.execute("begin")
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
        end_if_forked(self._lender.forks)
        connection = self._connection
        try:
            if error is None:
                self._check(connection)
                text = self._lender.completion(connection, self._job)
                with committing(connection, self._lender.answer_within):
                    await connection.execute(text, prepare=False)
                self._note_committed()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None and _is_open(connection):
                with undoing(connection, self._lender.answer_within):
                    await connection.rollback()
            lost = connection.broken
            await self._borrowed.__aexit__(None, None, None)
        if error is not None:
            refuse_lost(lost, error)

    def _check(self, connection: Any) -> None:
        closed = connection.closed and not connection.broken
        if closed or connection.info.transaction_status == pq.TransactionStatus.IDLE:
            ended = "closed the connection" if closed else "ended the transaction"
            raise JobsError(
                f"the handler of {self._job.type!r} {ended} that it was lent, so job "
                f"{self._job.id} could not be completed with it: leave commit, "
                "rollback and close to the `with job.transaction()` block"
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
def ours(
    connection: Any, done: str, answer_within: float | None = None
) -> Iterator[None]:
    """Tell a failure of our own statement from one of the handler's.

    Ours burns no attempt, and must be answered in time.
    """
    try:
        if connection is None:
            yield
        else:
            with _hurried(connection, answer_within):
                yield
    except psycopg.Error as error:
        if not is_passing(error):
            raise
        raise UnavailableError(
            f"the job's transaction could not be {done}: {error}"
        ) from error


@contextmanager
def committing(connection: Any, answer_within: float | None) -> Iterator[None]:
    """The same while committing, where a lost answer leaves the outcome open."""
    with ours(connection, "committed", answer_within), fenced():
        try:
            yield
        except psycopg.Error as error:
            if not connection.broken:
                raise
            raise UnknownCommitError(
                "the connection was lost while the job's transaction was committed, so "
                "its outcome is unknown here: the job runs again only if nothing was "
                f"committed ({error})"
            ) from error


@contextmanager
def undoing(connection: Any, answer_within: float | None) -> Iterator[None]:
    """A rollback: where it fails, why it was made must not be hidden.

    The driver may have raised an error, and not yet seen that the connection has gone;
    this asks it.
    """
    with suppress(psycopg.Error), _hurried(connection, answer_within):
        yield


@contextmanager
def _hurried(connection: Any, answer_within: float | None) -> Iterator[None]:
    connection.answer_within = answer_within
    try:
        yield
    finally:
        connection.answer_within = None


def refuse_lost(lost: bool, error: BaseException) -> None:
    """Raise an UnavailableError if the handler failed for want of the database."""
    if isinstance(error, psycopg.Error) and (lost or error.sqlstate in _AWAY):
        raise UnavailableError(
            f"the connection was lost inside the job's transaction: {error}"
        ) from error


def is_passing(error: psycopg.Error) -> bool:
    """Whether an error of our own statement says nothing about the job.

    One without a state is not the server's.
    """
    passing = isinstance(error, psycopg.OperationalError)
    return passing or error.sqlstate is None or error.sqlstate in _AWAY


# Read-only, no room, going down: whatever the statement was, it may work later. The
# driver counts some of them as internal errors.
_AWAY = {"25006", "25P03", "53100", "53200", "53300", "57P01", "57P02", "57P03"}
