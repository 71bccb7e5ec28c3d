"""Limits of rate: so many starts of a job type in so many seconds, over all pods.

The database has a bucket for each type. Whoever finds it empty is put off to a time at
which its turn should have come: every process keeps its own queue of such times. They
are guesses, since other processes have theirs; the bucket alone decides who starts.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

from jobs_lib.backoff import is_number
from jobs_lib.jobs.model import RateLimited

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs_lib.jobs.model import Job
    from jobs_lib.jobs.transaction import Lender
    from jobs_lib.jobs.type import JobType

_LEASED = 0.2
"""Seconds for which starts are good that were taken ahead."""
_LONGEST_WAIT = 3_600.0
"""Seconds after which a job asks again, whatever waits: the rate may have changed."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many starts in so many seconds, over all pods.

    In any time as many may start as fit into it by the rate, and those of one second
    (at least one) more: a burst after a quiet time.
    """

    starts: int
    """How many may start."""
    per: float = 1.0
    """In how many seconds. Defaults to one."""

    def __post_init__(self) -> None:
        are_numbers = type(self.starts) is int and is_number(self.per)
        if not (
            are_numbers and 1 <= self.starts <= 1_000_000 and 0 < self.per <= 86_400
        ):
            raise ValueError(
                "a rate needs 1 to 1,000,000 starts in above 0 to 86,400 seconds, not "
                f"{self}"
            )

    @property
    def per_second(self) -> float:
        """How many may start in a second."""
        return self.starts / self.per

    @property
    def capacity(self) -> float:
        """How many the bucket holds; with those taken ahead it is a second's worth."""
        return max(1.0, self.per_second * (1 - _LEASED))


@dataclass(slots=True)
class _Gate:
    """One type's, in one process; times are of the monotonic clock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    leased: int = 0
    leased_until: float = 0.0
    empty_until: float = 0.0
    booked_until: float = 0.0


class Throttle:
    """Lets jobs of types with a rate start, or puts them off; for many threads."""

    def __init__(self, types: Mapping[str, JobType[Any]], lender: Lender) -> None:
        self._lender = lender
        # By the type's own name: what waits under an alias starts at the same rate.
        self._gates = {t.name: _Gate() for t in types.values() if t.rate}

    def guard(
        self, job_type: JobType[Any], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function, called only when the type's rate allows a start."""
        rate = job_type.rate
        if rate is None:
            return function
        # Not before jobs are run: it takes 0.05 s, which an App would pay for its Rate.
        import asyncio

        limit = rate  # for the type checker, who does not follow it into a function
        name = job_type.name

        @wraps(function)
        def guarded(job: Job, **values: Any) -> Any:
            self._admit(job, name, limit)
            job.lane.ensure_may_begin()
            return function(job, **values)

        @wraps(function)
        async def guarded_async(job: Job, **values: Any) -> None:
            await asyncio.to_thread(self._admit, job, name, limit)
            job.lane.ensure_may_begin()
            await function(job, **values)

        return guarded_async if job_type.is_async else guarded

    def _admit(self, job: Job, name: str, rate: Rate) -> None:
        gate = self._gates[name]
        with gate.lock:
            now = time.monotonic()
            # Who has waited for a time asks before those who have just come.
            if job.run_at is not None or gate.booked_until <= now:
                if gate.leased and now < gate.leased_until:
                    gate.leased -= 1
                    return
                if now >= gate.empty_until and self._take(name, rate, gate):
                    return
            at = max(now, gate.empty_until, gate.booked_until + 1 / rate.per_second)
            gate.booked_until = at = min(at, now + _LONGEST_WAIT)
        raise RateLimited(
            at - now, f"{rate.starts:,} starts in {rate.per:,g} s over all pods"
        )

    def _take(self, name: str, rate: Rate, gate: _Gate) -> bool:
        parameters = {
            "type": name,
            "per_second": rate.per_second,
            "capacity": rate.capacity,
            "wanted": max(1, math.floor(rate.per_second * _LEASED / 2)),
        }
        with self._lender.ask("start under its rate", "asked for") as connection:
            row = connection.execute(
                self._lender.queries["take_starts"], parameters
            ).fetchone()
        assert row is not None
        granted, seconds = row
        now = time.monotonic()
        gate.leased, gate.leased_until = max(0, granted - 1), now + _LEASED
        gate.empty_until = now + seconds
        return bool(granted)
