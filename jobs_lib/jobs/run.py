"""Run one job: decode, handle, decide. No loop and no claim in here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import pq

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.db import Queries, fenced
from jobs_lib.errors import FencedError, JobsError, UnavailableError
from jobs_lib.jobs.context import handled
from jobs_lib.jobs.model import Discard, Job, Lane, Outcome, Result, Snooze

if TYPE_CHECKING:
    from uuid import UUID

    from jobs_lib.jobs.type import JobType

Borrow = Callable[[], AbstractContextManager[psycopg.Connection[Any]]]
"""Lends a connection in autocommit mode."""
_ERROR_LIMIT = 2_000


class Runner:
    """Runs jobs; used by many threads at once."""

    def __init__(
        self,
        types: Mapping[str, JobType[Any]],
        queries: Queries,
        owner: UUID,
        borrow: Borrow,
    ) -> None:
        self._types = types
        self._queries = queries
        self._owner = owner
        self._borrow = borrow
        self._lend = self._transaction

    def run(self, job: Job) -> Outcome | None:
        """Run one job and say what became of it; None for completed. Never raises."""
        listened = telemetry.listened()
        if listened:
            telemetry.emit("job.started", job=job)
        lane = job.lane
        job.lend = self._lend
        outcome = None
        try:
            job_type = self._types[job.type]
            payload = job.payload
            if payload is None:
                payload = self._read_payload(job)
            values = job_type.payload.decode(payload)
            token = handled.set(lane.origin)
            try:
                job_type.function(job, **values)
            finally:
                handled.reset(token)
        # SystemExit, too: a handler that raises it ends its job, not the pod.
        except BaseException as error:
            outcome = self._explain(job, error)
        job.lend = None
        if job.completed:
            # Its transaction is in: whatever failed came after it.
            outcome = Outcome(job, Result.COMMITTED, outcome and outcome.error)
        if outcome is None and lane.group is not None:
            lane.done.append(job)
        if listened:
            result = Result.COMPLETED if outcome is None else outcome.result
            error_text = outcome and outcome.error
            telemetry.emit("job.ran", job=job, outcome=result.value, error=error_text)
        return outcome

    def _read_payload(self, job: Job) -> str:
        with self._borrow() as connection:
            row = connection.execute(
                self._queries["payload"], {"origin": job.origin, "id": job.id}
            ).fetchone()
        if row is None:
            raise FencedError(f"job {job.id} is no longer there: it ended elsewhere")
        return str(row[0])

    @contextmanager
    def _transaction(self, job: Job) -> Iterator[psycopg.Connection[Any]]:
        lane = job.lane
        with self._borrow() as connection:
            with _ours():
                connection.execute("begin")
            try:
                yield connection
                self._commit(connection, lane, job)
            except BaseException:
                if connection.info.transaction_status != pq.TransactionStatus.UNKNOWN:
                    connection.rollback()
                raise
        for done in (*lane.done, job):
            done.completed = True
        lane.done.clear()

    def _commit(
        self, connection: psycopg.Connection[Any], lane: Lane, job: Job
    ) -> None:
        if connection.info.transaction_status == pq.TransactionStatus.IDLE:
            raise JobsError(
                f"the handler of {job.type!r} ended the transaction that it was lent, "
                f"so job {job.id} could not be completed with it: leave commit and "
                "rollback to the `with job.transaction()` block"
            )
        for done in lane.done:
            done.carried = True
        # The commit travels behind the completion in one round trip: a process that is
        # stopped between the two cannot hold up a take-over, and a completion that is
        # refused makes the server roll back.
        with _ours(), fenced(), connection.pipeline():
            connection.execute(
                self._queries["complete_own"],
                {
                    "owner": self._owner,
                    "origin": lane.origin,
                    "epoch": lane.epoch,
                    "id": job.id,
                    "keep": self._types[job.type].keep,
                    # What ran before it in its group must not be found unfinished after
                    # this job's effect is in.
                    "before": [done.id for done in lane.done],
                    "before_keep": [self._types[done.type].keep for done in lane.done],
                },
                prepare=True,
            )
            connection.execute("commit")

    def _explain(self, job: Job, error: BaseException) -> Outcome:
        text = f"{type(error).__name__}: {error}"[:_ERROR_LIMIT].replace("\0", "")
        text = text.encode("utf-8", "replace").decode()
        policy = self._types[job.type].retry
        if isinstance(error, Snooze):
            return Outcome(job, Result.SNOOZED, text, error.seconds)
        if isinstance(error, FencedError):
            return Outcome(job, Result.FENCED, text)
        if isinstance(error, UnavailableError):
            # Our own statement failed, not the handler: no attempt is burnt.
            return Outcome(job, Result.SNOOZED, text, RECONNECT.delay(3))
        if isinstance(error, Discard) or policy.exhausted(job.attempt):
            return Outcome(job, Result.DISCARDED, text)
        return Outcome(job, Result.RETRIED, text, policy.delay(job.attempt))


@contextmanager
def _ours() -> Iterator[None]:
    """Tell a lost connection under our own statements from one under the handler's."""
    try:
        yield
    except psycopg.OperationalError as error:
        raise UnavailableError(
            f"the connection was lost while the job's transaction was opened or "
            f"committed: {error}"
        ) from error
