"""Suspects: jobs that were claimed when two processes died, and may have killed them.

A job of one crash runs like any other: most jobs that a dead process had claimed are
innocent, and one handler's time is enough for all of them. Only a job whose process
dies once more is run alone.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from jobs_lib.executor.lane import Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Container

    from jobs_lib.backoff import Retry
    from jobs_lib.executor.lane import ClaimedJob

SUSPECT = 2
"""After this number of crashes a job runs with no other suspect beside it."""
GUILTY = 3
"""This number of crashes fails a job: in the last, no other suspect ran beside it."""
_CRASH = "crash"
"""Stands in place of the error's class."""


class Suspects:
    """The suspects of some origins: one at a time is in flight, no other beside it."""

    def __init__(self, alone: threading.Lock | None) -> None:
        """Prepare.

        Args:
            alone: held while a suspect is in flight, by one claimer of the owner; None
                if it has no other claimer.
        """
        self._alone = alone or threading.Lock()
        self._waiting: dict[int, str] = {}
        self._chosen = 0
        self._was_claimed = False
        """Whether the claim that named the chosen one has committed."""

    def add(self, job_id: int, origin: str) -> None:
        """A claim has seen a suspect; it waits for its turn."""
        self._waiting[job_id] = origin

    def clear(self) -> None:
        """Forget all; claims see the existing ones again."""
        self._waiting.clear()

    def release(self, origins: Container[str]) -> None:
        """Forget the suspects of released origins."""
        self._waiting = {i: o for i, o in self._waiting.items() if o not in origins}

    def choose(
        self, flying: Container[int], active: Container[str]
    ) -> tuple[int, str] | None:
        """The suspect whose turn it is, with its origin; None while another is in
        flight.

        Args:
            flying: the jobs in flight.
            active: the origins that may be claimed from now. A suspect of another one,
                paused or about to leave, keeps its place.
        """
        if self._chosen in flying:
            return None
        self._free()
        ready = ((i, o) for i, o in self._waiting.items() if o in active)
        chosen = next(ready, None)
        if chosen is None or not self._alone.acquire(blocking=False):
            return None
        self._chosen, _ = chosen
        self._was_claimed = False
        return chosen

    def note_ended(self, flying: Container[int]) -> None:
        """Let another claimer have its turn as soon as the chosen one has ended."""
        if self._was_claimed and self._chosen not in flying:
            self._free()

    def _free(self) -> None:
        if self._chosen:
            self._chosen, self._was_claimed = 0, False
            self._alone.release()

    def asked(self, skipped: Container[str] = ()) -> None:
        """The claim naming the chosen one has committed, except in these origins."""
        self._was_claimed = self._chosen > 0
        if self._waiting.get(self._chosen) not in skipped:
            self._waiting.pop(self._chosen, None)


def explain_crashes(job: ClaimedJob, policy: Retry) -> Outcome:
    """The outcome of a job that was in three crashes: it is the likely cause."""
    error = f"the process died {job.crashes} times while this job may have been running"
    failed = job.attempt - 1
    if policy.exhausted(failed):
        return Outcome(job, Result.DISCARDED, error, ran=False, kind=_CRASH)
    delay = policy.delay(failed)
    return Outcome(job, Result.RETRIED, error, delay, ran=False, kind=_CRASH)
