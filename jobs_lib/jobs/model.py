"""A job, a lane of jobs, and what became of one."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING
from uuid import UUID, uuid5

from jobs_lib.errors import JobsError
from jobs_lib.jobs.lease import UNLIMITED, Lease, NotBegun

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.jobs.ended import Ended
    from jobs_lib.jobs.transaction import Transaction


@dataclass(slots=True, eq=False)
class Lane:
    """What one claim took from one origin: of one group in order, or without a group.

    A group's jobs run one after the other; jobs without a group run independently.
    """

    origin: str
    epoch: int
    group: str | None
    seq: int
    """The claim that took them."""
    installation: UUID
    """Of the database that holds the jobs: ids are unique only there."""
    ended: Ended
    """Where its jobs end."""
    lease: Lease = UNLIMITED
    """Under which it was claimed; nothing of it begins once that is over."""
    server: int = 0
    """Where its jobs were claimed: on another server, commits may be lost since."""
    value: str = field(default="", repr=False)
    """Of a group, where a limit counts by value: that of its jobs."""
    jobs: deque[Job] = field(default_factory=deque)
    """Those of a group that have not started yet."""
    last: int = 0
    """The id of the last job that was taken of the group."""
    late: int = 0
    """A job of the group that came late, before the last one of this lane."""
    after: int | None = None
    """The group goes on behind this id, once it is written how that job ended."""
    anew: bool = False
    """Whether the group goes on from its start: commits may be lost."""
    more: bool = False
    """Whether the group goes on behind this lane."""
    dropped: bool = False
    """Set when the origin is given up: what has not started must not start."""
    lingers: bool = False
    """Set when a job of it runs on after its origin was given up."""
    failed: bool = False
    """Set when its head waits for another attempt: the group waits with it."""
    yields: bool = False
    """Whether one that runs last only has failed: see :meth:`gives_way`."""
    done: list[Job] = field(default_factory=list)
    """Of a group: ran to their end, their completion not yet known to be committed."""

    def gives_way(self) -> bool:
        """Whether a newer job may stand for the one that has failed."""
        return self.failed and self.yields and self.more

    def is_over(self) -> bool:
        """Whether nothing of it may begin any more; asked before each start."""
        # Not by a call: this stands before each job.
        return self.dropped or time.monotonic() >= self.lease.until

    def ensure_may_begin(self) -> None:
        """Asked once more after a wait between the start of a job and its handler.

        Raises:
            NotBegun: nothing of the lane may begin any more.
        """
        if self.is_over():
            raise NotBegun("the lease was over, or the origin given up")


@dataclass(slots=True, eq=False)
class Job:
    """One job as its handler sees it."""

    lane: Lane = field(repr=False)
    id: int
    type: str
    group: str | None
    attempt: int
    """1 for the first attempt; attempts that were not the job's fault do not count."""
    crashes: int
    """Processes that died while it may have been running, since its last failure."""
    priority: int
    """1 high, 0 normal, -1 batch."""
    payload: str | None = field(repr=False)
    """The payload as JSON text; None for a large one, until the job starts."""
    run_at: datetime | None
    enqueued: float = field(repr=False)
    """Seconds since the epoch at which it was enqueued, by the database's clock."""
    headers: dict[str, str] | None = field(repr=False)
    """Context that travels with the job, such as a trace."""
    place: str = field(default="(0,0)", repr=False)
    """Where its row lay when it was claimed, as PostgreSQL's ctid."""
    value: str | None = field(default=None, repr=False)
    """Where a limit counts by value: the job's, as text."""
    started: bool = False
    completed: bool = False
    """Set once its completion is known to be committed."""
    carried: bool = False
    """Set when a later job of its lane completes it, too, in a transaction of its own:
    whoever comes second finds nothing left, and that is well."""
    overtaken: bool = False
    """Set when commits were lost and its row is not its own any more, or not the first
    of its group: what becomes of this run is not written."""
    cancel_requested: bool = False
    """Set when somebody asked to cancel it: a long handler looks, and raises Cancel."""
    timed_out: bool = False
    """Set when its time limit is over: whatever the handler still does is refused."""
    deadline: float = math.inf
    began: float = field(default=0.0, repr=False)
    """When an executor began to run it, by the clock of this process."""
    ended: float = field(default=0.0, repr=False)
    """When its handler had ended, where that is measured."""
    lend: Callable[[Job], Transaction] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """What a log needs to know of it."""
        return f"{self.id} ({self.type})"

    @property
    def enqueued_at(self) -> datetime:
        """When it was enqueued, by the database's clock."""
        return datetime.fromtimestamp(self.enqueued, UTC)

    @property
    def origin(self) -> str:
        """The origin ``topic/partition``, whose owner runs the job."""
        return self.lane.origin

    @property
    def installation(self) -> UUID:
        """The database that holds the job: ids are unique only there."""
        return self.lane.installation

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this job, different for any other job."""
        # A server that has lost commits gives their ids once more, at another time.
        enqueued = round(self.enqueued * 1_000_000)
        return str(uuid5(self.installation, f"{self.id}/{enqueued}"))

    def transaction(self) -> Transaction:
        """The job's own transaction: what is written in it commits with the job.

        For ``with`` in a plain handler, for ``async with`` in an async one.

        Leaving the block without an error completes the job and commits, both in one
        round trip and only if this process still owns the job's origin: the effect is
        exactly once in this database. Usable once per attempt.

        Raises:
            FencedError: on leaving, when another process has taken over; nothing that
                was written is kept, and the job runs there.
        """
        if self.lend is None:
            raise JobsError(
                f"job {self.id} has no transaction to give: it was given already, or "
                "the job is not being run by an executor"
            )
        lend, self.lend = self.lend, None
        return lend(self)


class Result(Enum):
    """What became of one attempt."""

    COMPLETED = "completed"
    COMMITTED = "committed"
    """Completed in the job's own transaction already."""
    RETRIED = "retried"
    SNOOZED = "snoozed"
    DISCARDED = "discarded"
    SUPERSEDED = "superseded"
    """Not run: a later job of its group stands for it."""
    CANCELLED = "cancelled"
    FENCED = "fenced"
    DROPPED = "dropped"
    """Not begun, since another process may own the job by now."""


FAILED = frozenset({Result.RETRIED, Result.DISCARDED})
"""Of attempts that failed."""


@dataclass(slots=True)
class Outcome:
    """The result of one attempt, on its way to the database."""

    job: Job
    result: Result
    error: str | None = None
    delay: float = 0.0
    """Seconds until the next attempt."""
    until: datetime | None = None
    """When the next attempt is due, instead of a delay."""
    frees: Lane | None = None
    """May start once this outcome is written."""
    ran: bool = True
    """False where the crashes before are what failed, and no further attempt."""
    lost_since: float | None = None
    """Where the job's own transaction lost its connection: when it had begun. Minus
    infinity where the server has refused a statement of it."""
    kind: str | None = None
    """What the error is called; None where nobody needs to be told of it."""
    trace: str | None = None
    """Where the handler's error came from."""


class Snooze(JobsError):
    """Raise in a handler to run the job again in ``seconds``; burns no attempt."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        if not 0 <= seconds <= 366 * 86_400:
            raise ValueError(f"snooze for 0 seconds to one year, not {seconds}")
        super().__init__(reason or f"snoozed for {seconds:g} s")
        # Not as given: a list of whole and of broken numbers is none to the driver.
        self.seconds = float(seconds)


class RateLimited(Snooze):
    """A limit of rate lets the job run no earlier than in ``seconds``."""


class RetryAfter(JobsError):
    """Raise in a handler that failed, to choose the time of the next attempt."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        if not 0 <= seconds <= 366 * 86_400:
            raise ValueError(f"retry after 0 seconds to one year, not {seconds}")
        super().__init__(reason or f"to be retried after {seconds:g} s")
        self.seconds = float(seconds)


class Cancel(JobsError):
    """Raise in a handler to end the job: it is neither completed nor kept."""


class Discard(JobsError):
    """Raise in a handler to give the job up for good; it is kept and can be listed."""
