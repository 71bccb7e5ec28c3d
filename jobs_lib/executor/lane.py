"""A claimed job, its lane, and what became of it.

A lane is what one claim took of one group, or of all jobs without a group in an origin.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from jobs_lib.jobs.job import Job
from jobs_lib.ownership.lease import UNLIMITED, Lease, NotBegun

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from uuid import UUID


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
    finished: Finished
    """Where its jobs end."""
    lease: Lease = UNLIMITED
    """Under which it was claimed; nothing of it begins once that is over."""
    server: int = 0
    """Where its jobs were claimed: on another server, commits may be lost since."""
    value: str = field(default="", repr=False)
    """Of a group, where a limit counts by value: that of its jobs."""
    jobs: deque[ClaimedJob] = field(default_factory=deque)
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
    done: list[ClaimedJob] = field(default_factory=list)
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
class ClaimedJob(Job):
    """A job with what an executor notes of it."""

    lane: Lane = field(repr=False)
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
    deadline: float = math.inf
    began: float = field(default=0.0, repr=False)
    """When an executor began to run it, by the clock of this process."""
    ended: float = field(default=0.0, repr=False)
    """When its handler had ended, where that is measured."""


Item: TypeAlias = ClaimedJob | Lane
"""What a worker takes: a job without a group, or a group's lane."""


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

    job: ClaimedJob
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


_STOPS_LANE = {Result.RETRIED, Result.SNOOZED, Result.FENCED, Result.DROPPED}
_GIVES_UP = {Result.DISCARDED, Result.CANCELLED}


class Finished:
    """Filled by many threads, emptied by the dispatcher's."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Told when it is time to look."""
        self.wake_at = 1
        """So many completed jobs are worth a round trip."""
        self._completed: deque[ClaimedJob] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._lanes: deque[Lane] = deque()

    def __bool__(self) -> bool:
        return bool(self._completed or self._outcomes or self._lanes)

    def add(self, job: ClaimedJob, outcome: Outcome | None) -> bool:
        """A job has ended; returns whether its group may go on. None is completed."""
        if outcome is None:
            self._completed.append(job)
            if len(self._completed) >= self.wake_at:
                self.wake()
            return True
        # What is behind a job that waits for another attempt waits with it. What is
        # behind one that was given up waits until that is written: a crash would bring
        # the job back, behind what has taken effect after it.
        gives_up = outcome.result in _GIVES_UP and job.group is not None
        if gives_up:
            job.lane.after = job.id
        elif outcome.result is Result.DROPPED and job.lane.after is None:
            job.lane.after = job.id - 1
        self._outcomes.append(outcome)
        self.wake()
        return not gives_up and outcome.result not in _STOPS_LANE

    def drop(self, job: ClaimedJob) -> bool:
        """A job must not begin; returns that its group may not go on."""
        job.started = False
        late = None if job.lane.dropped else "the lease was over"
        return self.add(job, Outcome(job, Result.DROPPED, late))

    def add_lane(self, lane: Lane) -> None:
        """Nothing of a lane runs any more."""
        self._lanes.append(lane)

    def take(self) -> tuple[list[ClaimedJob], list[Outcome], list[Lane]]:
        """All that has ended since the last call: completed jobs, outcomes, lanes."""
        # The lanes first: whatever a lane has ended is there when its own end is.
        lanes = [self._lanes.popleft() for _ in range(len(self._lanes))]
        outcomes = [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        completed = [self._completed.popleft() for _ in range(len(self._completed))]
        return completed, outcomes, lanes
