"""Decide what a worker runs next: jobs, lanes and turns, for threads and event loops.

The decisions are a generator of steps, written once. A thread or a task drives it: it
runs each job that the generator yields, and sends the outcome back.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from jobs_lib.executor.lane import ClaimedJob, Lane
from jobs_lib.executor.running.batch_runner import BatchRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from jobs_lib.executor.lane import Item, Outcome
    from jobs_lib.executor.limiting.turn import Turn
    from jobs_lib.executor.running.runner import Runner

WorkerId = TypeVar("WorkerId")
"""Names a worker: the number of a thread, or a task."""


_YIELD_AFTER = 50
"""Jobs and lanes that an async worker runs before others get the event loop."""


class Then(Enum):
    """What follows after a job."""

    GO_ON = "go on"
    """The next job of its group may run."""
    STOP = "stop"
    """Its group waits, and so does what is left of its lane."""
    LEAVE = "leave"
    """The job's time was over, and another worker has taken this one's place."""


Decisions: TypeAlias = "Generator[ClaimedJob | None, Outcome | None, Then]"
"""Yields a job that is to run now, and receives its outcome, None for completed."""


class LaneRunner(Generic[WorkerId]):
    """Shares what waits among workers, and notes what they run.

    A job that the generator yields has begun. If its worker raises an error instead of
    an outcome, it throws the error into the generator, which lets the job fail.
    """

    def __init__(
        self,
        runner: Runner,
        limits: Mapping[str, float],
        pass_on: Callable[[Lane], None],
        watch: Callable[[], None],
        *,
        is_async: bool,
    ) -> None:
        """Prepare.

        Args:
            runner: knows the types, and the outcomes of jobs that it did not run.
            limits: the time limits of types that have one, in seconds.
            pass_on: takes a lane whose next job is for workers of the other kind.
            watch: called when a job with a time limit begins.
            is_async: whether the workers run async handlers, which can be cancelled.
        """
        self._runner = runner
        self._limits = limits
        self._pass_on = pass_on
        self._watch = watch
        self._is_async = is_async
        self.stopping = False
        """Whether no more jobs may begin."""
        self.ready: deque[Item | Turn] = deque()
        """Waits for a worker."""
        self._batches: BatchRunner | None = None
        if runner.has_batches and not is_async:
            self._batches = BatchRunner(runner, self.ready)
        self.running: dict[WorkerId, ClaimedJob] = {}
        """Running jobs by their worker: all async ones, others with a time limit."""
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

        The handler cannot be stopped. Its work can no longer commit, because the
        attempt is over in the database; another worker takes the place of this one.
        """
        if self.running.pop(worker, None) is None:
            return False
        job.timed_out = True
        job.lane.finished.add(job, self._runner.time_out(job))
        if turn := self.turns.pop(worker, None):
            turn.abort()
        if job.group is not None:
            job.lane.failed = True
            job.lane.finished.end_lane(job.lane)
        return True

    def decide(
        self, worker: WorkerId
    ) -> Generator[ClaimedJob | None, Outcome | None, None]:
        """Yield the jobs that a worker is to run, and None when it should wait.

        It should wait when nothing is left to run. A task should also let other tasks
        have the event loop from time to time.
        """
        ran = 0
        while not self.stopping:
            try:
                item = self.ready.popleft()
            except IndexError:
                yield None
                continue
            if self._batches is not None:
                begun = self._batches.run(item)
                if begun is not None:
                    self.ran += begun
                    continue
            if isinstance(item, ClaimedJob):
                then = yield from self._run(item, worker)
            elif isinstance(item, Lane):
                then = yield from self._run_lane(item, worker)
            else:
                then = yield from self._run_turn(item, worker)
            if then is Then.LEAVE:
                return
            ran += 1
            if self._is_async and ran % _YIELD_AFTER == 0:
                yield None

    def _run_turn(self, turn: Turn, worker: WorkerId) -> Decisions:
        """Run the jobs that wait behind a limit, one after the other."""
        self.turns[worker] = turn
        try:
            while not self.stopping:
                item = turn.take()
                if item is None:
                    break
                if isinstance(item, ClaimedJob):
                    then = yield from self._run(item, worker)
                else:
                    then = yield from self._run_lane(item, worker)
                if then is Then.LEAVE:
                    return then
                # A task also ends a long turn for the sake of its event loop.
                if (self.ready or self._is_async) and turn.is_long():
                    self.ready.append(turn)
                    break
        except BaseException:
            if self.turns.pop(worker, None):
                turn.abort()
            raise
        self.turns.pop(worker, None)
        return Then.GO_ON

    def _run(self, job: ClaimedJob, worker: WorkerId) -> Decisions:
        lane = job.lane
        try:
            job.started = True
            self.ran += 1
            # The same as `lane.is_over()`, without a call for each job.
            job.began = monotonic()
            if lane.dropped or job.began >= lane.lease.until:
                goes_on = lane.finished.drop(job)
            elif job.cancel_requested:
                goes_on = lane.finished.add(job, self._runner.cancelled(job))
            else:
                limit = self._limits.get(job.type) if self._limits else None
                if limit is None and not self._is_async:
                    outcome = yield job
                else:
                    self.running[worker] = job
                    if limit is not None:
                        job.deadline = job.began + limit
                        self._watch()
                    outcome = yield job
                    if self.running.pop(worker, None) is None:
                        return Then.LEAVE
                goes_on = lane.finished.add(job, outcome)
        except BaseException as error:
            # If its outcome is written already, this one changes nothing.
            self.running.pop(worker, None)
            if not job.timed_out:
                lane.finished.add(job, self._runner.fail(job, error))
            raise
        return Then.GO_ON if goes_on else Then.STOP

    def _run_lane(self, lane: Lane, worker: WorkerId) -> Decisions:
        jobs = lane.jobs
        try:
            while not lane.dropped and not self.stopping:
                try:
                    job = jobs.popleft()
                except IndexError:
                    break
                if self._runner.is_async(job) is not self._is_async:
                    jobs.appendleft(job)
                    self._pass_on(lane)
                    return Then.GO_ON
                then = yield from self._run(job, worker)
                if then is Then.LEAVE:
                    return then
                if then is Then.STOP:
                    lane.failed = True
                    break
            lane.finished.add_lane(lane)
            if lane.failed or not self.ready:
                lane.finished.wake()
        except BaseException:
            lane.failed = True
            lane.finished.end_lane(lane)
            raise
        return Then.GO_ON
