"""A claimed job, its lane, and its outcome.

A lane holds the jobs that one claim took of one group, or the jobs without a group that
it took of an origin.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from jobs_lib.errors import JobsError
from jobs_lib.jobs.job import Job
from jobs_lib.ownership.lease import UNLIMITED, Lease, NotBegun

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from uuid import UUID


@dataclass(slots=True, eq=False)
class Lane:
    """The jobs that one claim took from an origin: of one group in order, or of none.

    A group's jobs run one after the other; jobs without a group run independently.
    """

    origin: str
    epoch: int
    group: str | None
    seq: int
    """The number of the claim that took them."""
    installation: UUID
    """The identity of the jobs' database: ids are unique only in it."""
    finished: Finished
    """The place that takes its finished jobs."""
    lease: Lease = UNLIMITED
    """The lease under which it was claimed; when it is over, no job of it begins."""
    server: int = 0
    """The server on which its jobs were claimed: another one may lack commits."""
    value: str = field(default="", repr=False)
    """For a group, if a limit counts by value: the value of its jobs."""
    jobs: deque[ClaimedJob] = field(default_factory=deque)
    """The jobs of a group that have not started yet."""
    last: int = 0
    """The id behind which the group goes on; 0 means from its floor on, see
    :class:`~jobs_lib.executor.claiming.group_starts.GroupStarts`."""
    top: int = 0
    """The highest id that the claim took of the group."""
    after: int | None = None
    """The group goes on behind this id, once that job's outcome is written."""
    anew: bool = False
    """Whether the group goes on from its start: commits may be lost, a job that was to
    wait for another attempt is gone, or a job has come late, in front of others."""
    more: bool = False
    """Whether the group goes on behind this lane."""
    dropped: bool = False
    """Set when the origin is released: jobs that have not started must not start."""
    lingers: bool = False
    """Set when a job of it runs on after its origin was released."""
    failed: bool = False
    """Set when its first job waits for another attempt: the group waits with it."""
    yields: bool = False
    """Whether a job that runs last only has failed: see :meth:`gives_way`."""
    done: list[ClaimedJob] = field(default_factory=list)
    """Jobs of a group that ended well, whose completion may not be committed yet."""

    def note_passed(self, job_id: int) -> None:
        """Note a job that was passed over, because its group is in flight here.

        The id is 0 if it may stand in front of all others.
        """
        self.more = True
        # However short the lane is by now: what it gave back stands behind this job.
        self.anew |= job_id <= self.top

    def gives_way(self) -> bool:
        """Whether a newer job may replace the one that has failed."""
        return self.failed and self.yields and self.more

    def is_over(self) -> bool:
        """Whether no job of it may begin any more; checked before each start."""
        # No function call here: this runs before each job.
        return self.dropped or time.monotonic() >= self.lease.until

    def ensure_may_begin(self) -> None:
        """Check again after a wait between the start of a job and its handler.

        Raises:
            NotBegun: no job of the lane may begin any more.
        """
        if self.is_over():
            raise NotBegun("the lease was over, or the origin released")


@dataclass(slots=True, eq=False)
class ClaimedJob(Job):
    """A job, with the executor's notes about it."""

    lane: Lane = field(repr=False)
    place: str = field(default="(0,0)", repr=False)
    """The place of its row when it was claimed, as PostgreSQL's ctid."""
    placed: bool = field(default=False, repr=False)
    """Whether it may have places of records, which the jobs that it enqueues get."""
    value: str | None = field(default=None, repr=False)
    """The job's value as text, if a limit counts by value."""
    record: str = field(init=False, repr=False)
    """The place of its record, if its type waits for other groups: the number of the
    partition and the offset, as in ``7:4711``; empty if it comes from none."""
    started: bool = False
    completed: bool = False
    """Set once its completion is known to be committed."""
    carried: bool = False
    """Set when a later job of its lane also completes it, in a transaction of its own.
    The second completion finds no row left, which is no error."""
    overtaken: bool = False
    """Set when commits were lost and its row is another job's now, or not the first of
    its group: the outcome of this run is not written."""
    deadline: float = math.inf
    began: float = field(default=0.0, repr=False)
    """The time at which the executor began to run it, by this process's clock."""
    ended: float = field(default=0.0, repr=False)
    """The time at which its handler ended, if that is measured."""

    def name_places(self) -> str | None:
        """Name it for the jobs that it enqueues, which get its places, if it has any.

        Its row is looked up when it enqueues: it may get more places while it runs.
        """
        return f"job {self.origin}:{self.id}" if self.placed else None

    def ensure_may_publish(self) -> None:
        """See the job. Others may own it already, and have published what is newer.

        Raises:
            NotBegun: its lease is over.
        """
        # Not by super(): a dataclass with slots is another class than the one here.
        Job.ensure_may_publish(self)
        if self.completed:
            raise JobsError(
                f"job {self.id} publishes when its transaction has committed: if the "
                "process died in between, the event would be missing. Publish inside "
                "the `with job.transaction()` block"
            )
        if self.lane.lease.is_over():
            raise NotBegun(f"the lease was over before job {self.id} could publish")


Item: TypeAlias = ClaimedJob | Lane
"""An item for a worker: a job without a group, or a group's lane."""


def find_head(item: Item) -> ClaimedJob | None:
    """The job with which an item begins; None if its lane is empty."""
    if isinstance(item, Lane):
        # Another thread may shorten the lane meanwhile, so it is not enough to look.
        try:
            return item.jobs[0]
        except IndexError:
            return None
    return item


def find_finished(item: Item) -> Finished:
    """The place that takes the item's finished jobs; it tells whose item it is."""
    return item.finished if isinstance(item, Lane) else item.lane.finished


class Result(Enum):
    """The kinds of result of an attempt."""

    COMPLETED = "completed"
    COMMITTED = "committed"
    """Already completed in the job's own transaction."""
    RETRIED = "retried"
    SNOOZED = "snoozed"
    DISCARDED = "discarded"
    SUPERSEDED = "superseded"
    """Not run: a later job of its group replaces it."""
    CANCELLED = "cancelled"
    FENCED = "fenced"
    DROPPED = "dropped"
    """Not begun, because another process may own the job by now."""


FAILED = frozenset({Result.RETRIED, Result.DISCARDED})
"""The results of failed attempts."""


@dataclass(slots=True)
class Outcome:
    """The result of one attempt, on its way to the database."""

    job: ClaimedJob
    result: Result
    error: str | None = None
    delay: float = 0.0
    """Seconds until the next attempt."""
    until: datetime | None = None
    """The time at which the next attempt is due, instead of a delay."""
    frees: Lane | None = None
    """The lane that may go on once this outcome is written."""
    ran: bool = True
    """False if the failure is that of earlier crashes, and not of a new attempt."""
    lost_since: float | None = None
    """The time at which the job's own transaction began, if it lost its connection.
    Minus infinity if the server refused a statement of it, or if another server that
    the handler needs is away."""
    kind: str | None = None
    """The name of the error; None if it need not be reported."""
    by: int | None = None
    """The job that a superseded one is replaced by."""
    trace: str | None = None
    """The end of the traceback of the handler's error."""


_STOPS_LANE = {Result.RETRIED, Result.SNOOZED, Result.FENCED, Result.DROPPED}
_GIVES_UP = {Result.DISCARDED, Result.CANCELLED}


class Finished:
    """Finished jobs: many threads add them, and the dispatcher's thread takes them."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Called when it is time to take the finished jobs."""
        self.wake_at = 1
        """This number of completed jobs is worth a round trip."""
        self._completed: deque[ClaimedJob] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._lanes: deque[Lane] = deque()

    def __bool__(self) -> bool:
        return bool(self._completed or self._outcomes or self._lanes)

    def add(self, job: ClaimedJob, outcome: Outcome | None) -> bool:
        """A job has ended; return whether its group may go on. None means completed."""
        if outcome is None:
            self._completed.append(job)
            if len(self._completed) >= self.wake_at:
                self.wake()
            return True
        # Jobs behind one that waits for another attempt wait with it. Jobs
        # behind a discarded one wait until that is written: otherwise a crash would
        # bring it back after later jobs have taken effect.
        gives_up = outcome.result in _GIVES_UP and job.group is not None
        if gives_up:
            job.lane.after = job.id
        elif outcome.result is Result.DROPPED and job.lane.after is None:
            job.lane.after = job.id - 1
        self._outcomes.append(outcome)
        self.wake()
        return not gives_up and outcome.result not in _STOPS_LANE

    def drop(self, job: ClaimedJob) -> bool:
        """A job must not begin; return False, because its group may not go on."""
        job.started = False
        late = None if job.lane.dropped else "the lease was over"
        return self.add(job, Outcome(job, Result.DROPPED, late))

    def add_lane(self, lane: Lane) -> None:
        """No job of a lane runs any more."""
        self._lanes.append(lane)

    def end_lane(self, lane: Lane) -> None:
        """The same, for a lane that the dispatcher should take at once."""
        self.add_lane(lane)
        self.wake()

    def take(self) -> tuple[list[ClaimedJob], list[Outcome], list[Lane]]:
        """All that ended since the last call: completed jobs, outcomes, lanes."""
        # The lanes first: a lane ends after its jobs, so theirs are then there, too.
        lanes = [self._lanes.popleft() for _ in range(len(self._lanes))]
        outcomes = [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        completed = [self._completed.popleft() for _ in range(len(self._completed))]
        return completed, outcomes, lanes
