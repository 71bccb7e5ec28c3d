"""Lets jobs of types with a rate start, or puts them off.

The database has a bucket for each type. A job that finds it empty is put off to the
time at which its turn should come; each process keeps its own queue of such times. They
are guesses, because other processes have queues, too: only the bucket decides. The
queue begins anew when too few jobs come back at their times: the others were cancelled,
or run in another process.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

from jobs_lib.executor.running.own_time import OwnTime
from jobs_lib.jobs.job import RateLimited
from jobs_lib.jobs.rate import LEASED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs_lib.executor.lane import ClaimedJob
    from jobs_lib.executor.running.transaction import JobConnections
    from jobs_lib.jobs.rate import Rate
    from jobs_lib.jobs.type import JobType


_LONGEST_WAIT = 3_600.0
"""After this many seconds a job asks again in any case: the rate may have changed."""
_LATE = 2.0
"""Seconds within which a job that was put off comes back after its time."""


@dataclass(slots=True)
class _Gate:
    """The state of one type in this process; times are of the monotonic clock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    leased: int = 0
    leased_until: float = 0.0
    empty_until: float = 0.0
    booked_until: float = 0.0
    """The last time at which a job that was put off should start."""
    kept_until: float = 0.0
    """Up to which time jobs that were put off came back as they were booked."""


class Throttle:
    """Lets jobs of types with a rate start, or puts them off; for many threads."""

    def __init__(
        self, types: Mapping[str, JobType[Any]], connections: JobConnections
    ) -> None:
        self._connections = connections
        # By the type's own name: jobs under an alias share its rate.
        self._gates = {t.name: _Gate() for t in types.values() if t.rate}

    def guard(
        self, job_type: JobType[Any], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap a handler so that it is called only when the rate allows a start."""
        rate = job_type.rate
        if rate is None:
            return function
        # Imported only when jobs run: it takes 0.05 s, which an App need not pay.
        import asyncio

        limit = rate  # type checkers do not narrow `rate` inside a function
        name = job_type.name

        @wraps(function)
        def guarded(job: ClaimedJob, /, **values: Any) -> Any:
            with OwnTime(job):
                self._admit(job, name, limit)
            job.lane.ensure_may_begin()
            return function(job, **values)

        @wraps(function)
        async def guarded_async(job: ClaimedJob, /, **values: Any) -> None:
            with OwnTime(job):
                await asyncio.to_thread(self._admit, job, name, limit)
            job.lane.ensure_may_begin()
            await function(job, **values)

        return guarded_async if job_type.is_async else guarded

    def _admit(self, job: ClaimedJob, name: str, rate: Rate) -> None:
        gate = self._gates[name]
        with gate.lock:
            now = time.monotonic()
            between = 1 / rate.per_second
            late = _LATE + between
            if job.run_at is not None:
                # One for each interval, as they were booked. Where fewer come, this
                # time stays behind.
                kept = max(gate.kept_until, now - 2 * late)
                gate.kept_until = min(now, kept + between)
            elif gate.kept_until < now - late:
                gate.booked_until = min(gate.booked_until, now)
            # A job that was put off goes before those that have just come.
            if job.run_at is not None or gate.booked_until <= now:
                if gate.leased and now < gate.leased_until:
                    gate.leased -= 1
                    return
                if now >= gate.empty_until and self._take(name, rate, gate):
                    return
            if gate.booked_until <= now:
                # The first of a new queue: nobody is late yet.
                gate.kept_until = now
            at = max(now, gate.empty_until, gate.booked_until + between)
            gate.booked_until = at = min(at, now + _LONGEST_WAIT)
        raise RateLimited(
            at - now, f"{rate.starts:,} starts in {rate.per:,g} s over all pods"
        )

    def _take(self, name: str, rate: Rate, gate: _Gate) -> bool:
        parameters = {
            "type": name,
            "per_second": rate.per_second,
            "capacity": rate.capacity,
            "wanted": max(1, math.floor(rate.per_second * LEASED / 2)),
        }
        with self._connections.ask("start under its rate", "asked for") as connection:
            row = connection.execute(
                self._connections.queries["take_starts"], parameters
            ).fetchone()
        assert row is not None
        granted, seconds = row
        now = time.monotonic()
        gate.leased, gate.leased_until = max(0, granted - 1), now + LEASED
        gate.empty_until = now + seconds
        return bool(granted)
