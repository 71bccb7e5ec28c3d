"""What workers have ended, on its way to the dispatcher."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from jobs_lib.jobs.model import Job, Lane, Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Callable

_STOPS_LANE = {Result.RETRIED, Result.SNOOZED, Result.FENCED, Result.DROPPED}
_GIVES_UP = {Result.DISCARDED, Result.CANCELLED}


class Ended:
    """Filled by many threads, emptied by the dispatcher's."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Told when it is time to look."""
        self.wake_at = 1
        """So many completed jobs are worth a round trip."""
        self._completed: deque[Job] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._lanes: deque[Lane] = deque()

    def __bool__(self) -> bool:
        return bool(self._completed or self._outcomes or self._lanes)

    def add(self, job: Job, outcome: Outcome | None) -> bool:
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

    def drop(self, job: Job) -> bool:
        """A job must not begin; returns that its group may not go on."""
        job.started = False
        late = None if job.lane.dropped else "the lease was over"
        return self.add(job, Outcome(job, Result.DROPPED, late))

    def add_lane(self, lane: Lane) -> None:
        """Nothing of a lane runs any more."""
        self._lanes.append(lane)

    def take(self) -> tuple[list[Job], list[Outcome], list[Lane]]:
        """All that has ended since the last call: completed jobs, outcomes, lanes."""
        # The lanes first: whatever a lane has ended is there when its own end is.
        lanes = [self._lanes.popleft() for _ in range(len(self._lanes))]
        outcomes = [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        completed = [self._completed.popleft() for _ in range(len(self._completed))]
        return completed, outcomes, lanes
