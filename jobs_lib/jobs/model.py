"""A job, a lane of jobs, and what became of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

from jobs_lib.errors import JobsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from datetime import datetime

    import psycopg


@dataclass(slots=True)
class Job:
    """One job as its handler sees it."""

    id: int
    type: str
    origin: str
    group: str | None
    attempt: int
    """1 for the first attempt; attempts that were not the job's fault do not count."""
    payload: str
    """The payload as JSON text; the handler gets it decoded, by its signature."""
    run_at: datetime | None
    enqueued_at: datetime
    headers: dict[str, str] | None
    installation: UUID
    """Of the database that holds the job: ids are unique only there."""
    completed: bool = False
    """Set once its completion is known to be committed."""
    carried: bool = False
    """Set when a later job of its lane completes it, too, in a transaction of its own:
    whoever comes second finds nothing left, and that is well."""
    open_transaction: (
        Callable[[], AbstractContextManager[psycopg.Connection[Any]]] | None
    ) = field(default=None, repr=False)

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this job, different for any other job."""
        return str(uuid5(self.installation, str(self.id)))

    def transaction(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """The job's own transaction: what is written in it commits with the job.

        Leaving the block without an error completes the job and commits, both in one
        round trip and only if this process still owns the job's origin: the effect is
        exactly once in this database. Usable once per attempt.

        Raises:
            FencedError: on leaving, when another process has taken over; nothing that
                was written is kept, and the job runs there.
        """
        if self.open_transaction is None:
            raise JobsError(
                f"job {self.id} has no transaction to give: it was given already, or "
                "the job is not being run by an executor"
            )
        opened, self.open_transaction = self.open_transaction(), None
        return opened


class Result(Enum):
    """What became of one attempt."""

    COMPLETED = "completed"
    COMMITTED = "committed"
    """Completed in the job's own transaction already."""
    RETRIED = "retried"
    SNOOZED = "snoozed"
    DISCARDED = "discarded"
    FENCED = "fenced"


@dataclass(slots=True)
class Outcome:
    """The result of one attempt, on its way to the database."""

    job: Job
    result: Result
    error: str | None = None
    delay: float = 0.0
    """Seconds until the next attempt."""


@dataclass(slots=True, eq=False)
class Lane:
    """Jobs that run one after the other: some of a group in order, or a single one."""

    origin: str
    epoch: int
    group: str | None
    jobs: list[Job]
    seq: int
    """The claim that took them."""
    more: bool = False
    """Whether rows of the group were passed over while this lane was in flight."""
    dropped: bool = False
    """Set when the origin is given up: what has not started must not start."""
    started: bool = False
    """Set by the worker that picks it up, before it looks whether it was dropped."""
    failed: bool = False
    """Set when its head waits for another attempt: the group waits with it."""
    ended: bool = False
    """Set once everything that ran of it is settled."""
    done: list[Job] = field(default_factory=list)
    """Ran to their end, their completion not yet known to be committed."""


class Snooze(JobsError):
    """Raise in a handler to run the job again in ``seconds``; burns no attempt."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        if not 0 <= seconds <= 366 * 86_400:
            raise ValueError(f"snooze for 0 seconds to one year, not {seconds}")
        super().__init__(reason or f"snoozed for {seconds:g} s")
        self.seconds = seconds


class Discard(JobsError):
    """Raise in a handler to give the job up for good; it is kept and can be listed."""
