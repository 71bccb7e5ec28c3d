"""Run one job: decode the payload, call the handler, decide the outcome."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT, Retry
from jobs_lib.errors import (
    FencedError,
    JobsError,
    OutOfTurnError,
    StoredPayloadError,
    UnavailableError,
)
from jobs_lib.executor.lane import FAILED, ClaimedJob, Outcome, Result
from jobs_lib.executor.limiting.gate import GateClosed
from jobs_lib.executor.running.forked import end_if_forked
from jobs_lib.executor.running.in_turn import lend_in_turn
from jobs_lib.executor.running.own_time import OwnTime
from jobs_lib.jobs.batch import Item
from jobs_lib.jobs.context import Place, handled, holding
from jobs_lib.jobs.job import Cancel, Discard, RetryAfter, Snooze
from jobs_lib.masking import describe, trace
from jobs_lib.ownership.lease import NotBegun
from jobs_lib.reasons import name_class
from jobs_lib.returned import refuse_lazy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from jobs_lib.executor.limiting.gate import JobGate
    from jobs_lib.executor.running.loans import Loans
    from jobs_lib.executor.running.throttle import Throttle
    from jobs_lib.executor.running.transaction import JobConnections
    from jobs_lib.jobs.middleware import RunMiddleware
    from jobs_lib.jobs.type import JobType

    _Claimed = tuple[ClaimedJob, Item[Any]]
    """A job of a batch, and the item that the handler gets."""

_RETRY = Retry()
"""The policy for a job whose own policy raises an error."""
_LONGEST_DELAY = 100 * 366 * 86_400.0
_TIME_LIMIT = "time limit"
"""Stands in place of the error's class."""
_LONGEST_TRACE = 8_000
"""The number of characters kept from the end of a traceback."""
_NESTED = 100
"""Calls of middleware inside one another around a batch handler: each takes a few of
Python's thousand frames."""
_MISFIT_PAUSE = 60.0
"""Seconds at most until a job that does not fit its handler is tried again."""


class Runner:
    """Runs jobs; used by many threads at once."""

    def __init__(
        self,
        types: Mapping[str, JobType[Any]],
        connections: JobConnections,
        middleware: Sequence[RunMiddleware] = (),
        throttle: Throttle | None = None,
        gates: Mapping[str, JobGate] | None = None,
        *,
        is_timed: bool = False,
    ) -> None:
        """Prepare to run.

        Args:
            types: the handlers, by the name of their type.
            connections: lends connections to handlers.
            middleware: middleware, the first one outermost; async functions are called
                around async handlers, the others around plain handlers, and around a
                batch handler once for each of its jobs.
            throttle: keeps the types' rates; None to let all jobs start.
            gates: of the types that wait for other groups.
            is_timed: note in each job when its handler ended.
        """
        self.stopping = False
        """Whether the executor stops: then handlers are cancelled for that reason."""
        self.is_logged = True
        """Whether the start and the end of each job are logged."""
        self._is_timed = is_timed
        self._connections = connections
        self._lend = connections.lend
        self._types = types
        self.has_batches = any(t.batch > 1 for t in types.values())
        plain = [one for one in middleware if not asyncio.iscoroutinefunction(one)]
        waiting = [one for one in middleware if asyncio.iscoroutinefunction(one)]
        self._functions = {
            name: _surround(t.function, waiting if t.is_async else plain)
            for name, t in types.items()
        }
        self._plain = plain
        self._most = max(2, _NESTED // len(plain)) if plain else sys.maxsize
        """The number of jobs that one call of a batch handler takes at most."""
        if throttle is not None:
            for name, function in self._functions.items():
                self._functions[name] = throttle.guard(types[name], function)
        # The gate first: a job that waits for it must not use up a start.
        for name, gate in (gates or {}).items():
            self._functions[name] = gate.guard(
                self._functions[name], is_async=types[name].is_async
            )

    @property
    def loans(self) -> Loans:
        """The connections of running jobs with a time limit."""
        return self._connections.loans

    def run(self, job: ClaimedJob) -> Outcome | None:
        """Run one job and return its outcome, None for completed. Never raises."""
        if self.is_logged or telemetry.reports_each_job:
            telemetry.emit("job.started", job=job)
        job.lend = self._lend
        outcome = None
        try:
            text = job.payload
            if text is None:
                text = self._read_payload(job)
                job.lane.ensure_may_begin()
            values = self._types[job.type].payload.decode(text)
            token = handled.set(job)
            try:
                left = self._functions[job.type](job, **values)
                if left is not None:
                    refuse_lazy(left, f"the handler of {job.type!r}")
            finally:
                handled.reset(token)
        # SystemExit, too: if a handler raises it, its job ends, not the pod.
        except BaseException as error:
            outcome = self._explain(job, error)
        return self._finish(job, outcome)

    def run_batch(self, jobs: Sequence[ClaimedJob]) -> list[Outcome | None]:
        """Run several jobs of one type in one call; return their outcomes."""
        ends: dict[int, Outcome | None] = {}
        items: list[_Claimed] = []
        stopped: set[int] = set()
        waited = False
        for job in jobs:
            if self.is_logged or telemetry.reports_each_job:
                telemetry.emit("job.started", job=job)
            if job.group is not None and id(job.lane) in stopped:
                # It must keep the order behind a job that cannot be decoded.
                ends[job.id] = Outcome(job, Result.SNOOZED)
                continue
            waited |= job.payload is None
            try:
                items.append((job, Item(job, self._decode(job)["payload"])))
            except BaseException as error:
                stopped.add(id(job.lane))
                ends[job.id] = self._finish(job, self._explain(job, error))
        if waited:
            items = self._refuse_late(items, ends)
        if items:
            ends |= self._handle(items)
        return [ends[job.id] for job in jobs]

    def _refuse_late(
        self, items: list[_Claimed], ends: dict[int, Outcome | None]
    ) -> list[_Claimed]:
        """Drop jobs that may no longer begin, after the wait for a large payload."""
        # In order: in a group, no job begins behind one that may not.
        for job, _ in items:
            try:
                job.lane.ensure_may_begin()
            except NotBegun as error:
                ends[job.id] = self._finish(job, self._explain(job, error))
        return [(job, item) for job, item in items if job.id not in ends]

    def _handle(self, items: list[_Claimed]) -> dict[int, Outcome | None]:
        jobs = [job for job, _ in items]
        lend_in_turn(jobs, self._lend)
        try:
            with holding(_name_places(jobs)):
                self._call(items)
        except BaseException as error:
            if len(items) > 1:
                # Run each job alone to find the one that fails.
                return _end_in_order(items, self._handle_alone)
            items[0][1].failure = error
        return _end_in_order(items, self._end_item)

    def _handle_alone(self, job: ClaimedJob, item: Item[Any]) -> Outcome | None:
        """Run a job of a failed call by itself, unless it has committed there."""
        if job.completed:
            return self._end_item(job, item)
        item.failure = None
        if job.lane.is_over():
            return Outcome(job, Result.DROPPED, "the lease was over")
        return self._handle([(job, item)])[job.id]

    def _end_item(self, job: ClaimedJob, item: Item[Any]) -> Outcome | None:
        failed = item.failure
        # Compare with None: an error may be false.
        outcome = None if failed is None else self._explain(job, failed)
        return self._finish(job, outcome)

    def _call(self, items: list[_Claimed]) -> None:
        """Call a batch handler, inside the middleware of each of its jobs."""
        name = items[0][0].type
        function: Callable[..., Any] = self._types[name].function
        error: BaseException | None = JobsError("middleware has not run the handler")

        def handle() -> None:
            nonlocal error
            try:
                # A new list: the handler may change it.
                left = function([item for _, item in items])
                if left is not None:
                    refuse_lazy(left, f"the handler of {name!r}")
                error = None
            except BaseException as one:
                error = one
                raise

        call: Callable[[], Any] = handle
        for job, _ in reversed(items):
            for one in reversed(self._plain):
                call = partial(one, job, call)
        left = call()
        if left is not None:
            refuse_lazy(left, f"middleware around the handler of {name!r}")
        # What the middleware of one job has prevented, or forgiven, is not done for the
        # others: each must run alone.
        if error is not None and len(items) > 1:
            raise error

    async def run_async(self, job: ClaimedJob) -> Outcome | None:
        """Run one job with an async handler; see :meth:`run`."""
        if self.is_logged or telemetry.reports_each_job:
            telemetry.emit("job.started", job=job)
        job.lend = self._lend
        outcome = None
        try:
            if job.payload is None:
                with OwnTime(job):
                    job.payload = await asyncio.to_thread(self._read_payload, job)
                job.lane.ensure_may_begin()
            values = self._decode(job)
            token = handled.set(job)
            try:
                left = await self._functions[job.type](job, **values)
                if left is not None:
                    refuse_lazy(left, f"the handler of {job.type!r}")
            finally:
                handled.reset(token)
        except BaseException as error:
            outcome = self._explain(job, error)
        return self._finish(job, outcome)

    def _decode(self, job: ClaimedJob) -> dict[str, Any]:
        payload = job.payload
        if payload is None:
            payload = self._read_payload(job)
        return self._types[job.type].payload.decode(payload)

    def _finish(self, job: ClaimedJob, outcome: Outcome | None) -> Outcome | None:
        end_if_forked(self._connections.forks)
        job.lend = None
        if job.completed:
            # Its transaction has committed, so any error came after it.
            outcome = Outcome(job, Result.COMMITTED, outcome.error if outcome else None)
        if outcome is None and job.group is not None:
            job.lane.done.append(job)
        if self._is_timed:
            job.ended = monotonic()
        if self.is_logged or telemetry.reports_each_job:
            _emit_end(job, outcome or Outcome(job, Result.COMPLETED))
        return outcome

    def _read_payload(self, job: ClaimedJob) -> str:
        with OwnTime(job), self._connections.ask("payload", "read") as connection:
            row = connection.execute(
                self._connections.queries["payload"],
                {"origin": job.origin, "id": job.id},
            ).fetchone()
        if row is None:
            raise FencedError(f"job {job.id} is no longer there: it ended elsewhere")
        return str(row[0])

    def _explain(self, job: ClaimedJob, error: BaseException) -> Outcome:
        text = describe(error)
        # An error may be any object: it may hide its class, or lack its attributes.
        for one in (error, JobsError(text)):
            with suppress(BaseException):
                outcome = self._decide(job, one, text)
                # NaN fits into no column, and the year 10,000 into no timestamp.
                if outcome.delay >= 0:
                    outcome.delay = min(float(outcome.delay), _LONGEST_DELAY)
                    return _add_cause(outcome, error)
        delay = _RETRY.delay(job.attempt)
        return _add_cause(Outcome(job, Result.RETRIED, text, delay), error)

    def _decide(self, job: ClaimedJob, error: BaseException, text: str) -> Outcome:
        """Decide a job's outcome by its type's rules; raises the rules' errors."""
        job_type = self._types[job.type]
        if isinstance(error, asyncio.CancelledError):
            if job.cancel_requested:
                return Outcome(job, Result.CANCELLED, text)
            if job.timed_out:
                return self.time_out(job)
            if self.stopping:
                # The job is released, and this costs no attempt.
                return Outcome(job, Result.SNOOZED)
        if isinstance(error, Snooze):
            return Outcome(job, Result.SNOOZED, text, error.seconds)
        if isinstance(error, FencedError):
            # No outcome is written for it, so nothing else would report it.
            telemetry.emit("jobs.fenced", ids=[job.id])
            return Outcome(job, Result.FENCED, text)
        if isinstance(error, GateClosed):
            # It is claimed again once the gate opens: nothing went wrong.
            return Outcome(job, Result.DROPPED)
        if isinstance(error, NotBegun):
            return Outcome(job, Result.DROPPED, text)
        if isinstance(error, OutOfTurnError):
            # It is in turn once those ahead of it have ended: this costs no attempt.
            return Outcome(job, Result.SNOOZED, text)
        if isinstance(error, UnavailableError):
            delay, since = RECONNECT.delay(3), error.lost_since
            if error.is_of_job or since is not None:
                # Our own statement failed, not the handler: this costs no attempt.
                return Outcome(job, Result.SNOOZED, text, delay, lost_since=since)
            if error.is_passing and not _is_ruled(error, job_type):
                # No more does this. The pauses grow, and only the job tells of it.
                kind = name_class(error)
                return Outcome(
                    job, Result.SNOOZED, text, delay, lost_since=-math.inf, kind=kind
                )
        if isinstance(error, StoredPayloadError):
            # The release is at fault, not the job: a later release can run it.
            longest = min(_MISFIT_PAUSE, job_type.retry.cap)
            delay = longest * random.uniform(0.5, 1)
            return Outcome(job, Result.SNOOZED, text, delay)
        rule = job_type.find_rule(error)
        if isinstance(error, Cancel) or rule is Cancel:
            return Outcome(job, Result.CANCELLED, text)
        policy = job_type.retry if rule is None or isinstance(rule, type) else rule
        if (
            isinstance(error, Discard)
            or rule is Discard
            or policy.exhausted(job.attempt)
        ):
            return Outcome(job, Result.DISCARDED, text)
        delay = policy.delay(job.attempt)
        if isinstance(error, RetryAfter):
            delay = error.seconds
        return Outcome(job, Result.RETRIED, text, delay)

    def batch_size(self, job: ClaimedJob) -> int:
        """The number of jobs of its type that one call takes."""
        return min(self._types[job.type].batch, self._most)

    def is_async(self, job: ClaimedJob) -> bool:
        """Whether the job's handler runs on the event loop."""
        return self._types[job.type].is_async

    def cancelled(self, job: ClaimedJob) -> Outcome:
        """The outcome of a job that was cancelled before it started."""
        return Outcome(job, Result.CANCELLED)

    def time_out(self, job: ClaimedJob) -> Outcome:
        """The outcome of a job whose time limit is over."""
        job_type = self._types[job.type]
        text = f"the time limit of {job_type.time_limit:g} s is over"
        if job_type.retry.exhausted(job.attempt):
            return Outcome(job, Result.DISCARDED, text, kind=_TIME_LIMIT)
        delay = job_type.retry.delay(job.attempt)
        return Outcome(job, Result.RETRIED, text, delay, kind=_TIME_LIMIT)

    def fail(self, job: ClaimedJob, error: BaseException) -> Outcome:
        """The outcome of a job whose thread or event loop was ended by an error."""
        text = f"{describe(error)} has ended the thread that ran it"
        return self._explain(job, JobsError(text))


def _end_in_order(
    items: Iterable[_Claimed], end: Callable[[ClaimedJob, Item[Any]], Outcome | None]
) -> dict[int, Outcome | None]:
    """End each job; in a group, none behind one that has not ended well."""
    ends: dict[int, Outcome | None] = {}
    stopped: set[int] = set()
    for job, item in items:
        if id(job.lane) in stopped:
            job.lend = None
            ends[job.id] = Outcome(job, Result.SNOOZED)
            continue
        ends[job.id] = outcome = end(job, item)
        is_well = outcome is None or outcome.result is Result.COMMITTED
        if job.group is not None and not is_well:
            stopped.add(id(job.lane))
    return ends


def _emit_end(job: ClaimedJob, outcome: Outcome) -> None:
    seconds = round(time.monotonic() - job.began, 6) if job.began else None
    result, error = outcome.result.value, outcome.error
    telemetry.emit("job.ran", job=job, outcome=result, error=error, seconds=seconds)


def _is_ruled(error: UnavailableError, job_type: JobType[Any]) -> bool:
    """Whether a rule of the type says what to do while a server is away."""
    return any(
        issubclass(kind, UnavailableError) and isinstance(error, kind)
        for kind in job_type.rules
    )


def _add_cause(outcome: Outcome, error: BaseException) -> Outcome:
    """Note the cause of an attempt that failed, or that may count as failed."""
    has_failed = outcome.result in FAILED
    if outcome.kind is None and (has_failed or type(error) is StoredPayloadError):
        outcome.kind = name_class(error)
    if has_failed or outcome.lost_since is not None:
        outcome.trace = trace(error, theirs=True)[-_LONGEST_TRACE:]
    return outcome


def _surround(
    function: Callable[..., Any], middleware: Sequence[RunMiddleware]
) -> Callable[..., Any]:
    for one in reversed(middleware):
        function = _wrap(one, function)
    return function


def _wrap(one: RunMiddleware, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(job: ClaimedJob, /, **values: Any) -> Any | Awaitable[Any]:
        return one(job, partial(function, job, **values))

    return wrapped


def _name_places(jobs: Iterable[ClaimedJob]) -> Place | None:
    """Name the jobs whose places new jobs get from their handler; None for none."""
    named = [f"{job.origin}:{job.id}" for job in jobs if job.placed]
    return Place(" ".join(["job", *named])) if named else None
