"""Suspects: jobs that were claimed when their process died, and may have killed it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from jobs_lib.jobs.model import Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Container

    from jobs_lib.backoff import Retry
    from jobs_lib.jobs.model import Job

CRASHES = 2
"""So many count as failed attempts."""


class Suspects:
    """The suspects of some origins: one at a time is in flight, no other beside it."""

    def __init__(self, alone: threading.Lock | None = None) -> None:
        """Prepare.

        Args:
            alone: held while a suspect is in flight, by one claimer of the owner.
        """
        self._alone = alone or threading.Lock()
        self._waiting: dict[int, str] = {}
        self._chosen = 0

    def add(self, job_id: int, origin: str) -> None:
        """One was seen; it waits for its turn."""
        self._waiting[job_id] = origin

    def leave(self, origins: Container[str]) -> None:
        """Forget those of origins that are given away."""
        self._waiting = {i: o for i, o in self._waiting.items() if o not in origins}

    def choose(self, flying: Container[int]) -> tuple[int, str] | None:
        """Whose turn it is, with its origin; None while another one is in flight."""
        if self._chosen in flying:
            return None
        if self._chosen:
            self._chosen = 0
            self._alone.release()
        if not self._waiting or not self._alone.acquire(blocking=False):
            return None
        self._chosen = next(iter(self._waiting))
        return self._chosen, self._waiting[self._chosen]

    def asked(self) -> None:
        """The claim that named the chosen one has committed."""
        self._waiting.pop(self._chosen, None)


def explain_crashes(job: Job, policy: Retry) -> Outcome:
    """What becomes of a job whose process died twice: by now it is the likely cause."""
    error = f"the process died {job.crashes} times while this job may have been running"
    failed = job.attempt - 1
    if policy.exhausted(failed):
        return Outcome(job, Result.DISCARDED, error, ran=False)
    return Outcome(job, Result.RETRIED, error, policy.delay(failed), ran=False)
