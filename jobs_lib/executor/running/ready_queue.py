"""What waits for the workers of one kind, and what they run now."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jobs_lib.executor.lane import ClaimedJob, Item, Lane
    from jobs_lib.executor.limiting.turn import Turn
    from jobs_lib.executor.running.runner import Runner

WorkerId = TypeVar("WorkerId")
"""Names a worker: the number of a thread, or a task."""


class ReadyQueue(Generic[WorkerId]):
    """Jobs, lanes and turns that workers take; used by many threads at once."""

    def __init__(
        self,
        runner: Runner,
        limits: Mapping[str, float],
        pass_on: Callable[[Lane], None],
        watch: Callable[[], None],
        *,
        is_async: bool,
    ) -> None:
        """Make an empty queue.

        Args:
            runner: knows the types, and the outcomes of jobs that it did not run.
            limits: the time limits of types that have one, in seconds.
            pass_on: takes a lane whose next job is for workers of the other kind.
            watch: called when a job with a time limit begins.
            is_async: whether the workers run async handlers, which can be cancelled.
        """
        self.runner = runner
        self.limits = limits
        self.pass_on = pass_on
        self.watch = watch
        self.is_async = is_async
        self.stopping = False
        """Whether no more jobs may begin."""
        self.ready: deque[Item | Turn] = deque()
        """Waits for a worker."""
        self.running: dict[ClaimedJob, WorkerId] = {}
        """Running jobs and their workers: all async ones, others with a time limit."""
        self.turns: dict[WorkerId, Turn] = {}
        """Running turns by their worker."""
        self.ran = 0
        """The number of jobs that were begun."""

    def put(self, items: Sequence[Item | Turn], *, first: bool) -> None:
        """Add these in this order: ``first``, or after those that wait."""
        if first:
            self.ready.extendleft(reversed(items))
        else:
            self.ready.extend(items)

    def take_back(self) -> list[Item | Turn]:
        """Take everything back that no worker has begun."""
        taken: list[Item | Turn] = []
        while True:
            try:
                taken.append(self.ready.pop())
            except IndexError:
                return taken

    def stop(self) -> None:
        """Let no more jobs begin."""
        self.stopping = True
        self.ready.clear()

    def give_up(self, worker: WorkerId, job: ClaimedJob) -> bool:
        """End an attempt whose handler goes on; False if it has ended meanwhile.

        The handler cannot be stopped. Its own transaction is rolled back, and nothing
        else of it can commit, because the attempt is over in the database. Another
        worker takes the place of this one.
        """
        # By the job: its worker may have ended it, and run another one by now.
        if self.running.pop(job, None) is None:
            return False
        job.timed_out = True
        job.lane.finished.add(job, self.runner.time_out(job))
        if turn := self.turns.pop(worker, None):
            turn.abort()
        if job.group is not None:
            job.lane.failed = True
            job.lane.finished.end_lane(job.lane)
        self.runner.loans.give_up(job)
        return True
