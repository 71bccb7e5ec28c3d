"""Decide what one worker runs next, for threads and for tasks of an event loop."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Generic

from jobs_lib.executor.lane import ClaimedJob, Lane
from jobs_lib.executor.running.batch_runner import BatchRunner
from jobs_lib.executor.running.ready_queue import WorkerId

if TYPE_CHECKING:
    from jobs_lib.executor.lane import Outcome
    from jobs_lib.executor.limiting.turn import Turn
    from jobs_lib.executor.running.ready_queue import ReadyQueue


class LaneRunner(Generic[WorkerId]):
    """Takes a worker through jobs, lanes and turns, and notes how each job ends.

    The worker calls :meth:`take`, runs the job, and calls :meth:`end`. An error from
    outside may hit the worker anywhere; it then calls :meth:`fail`.
    """

    __slots__ = ("_batches", "_job", "_lane", "_queue", "_shows", "_turn", "_worker")

    def __init__(self, queue: ReadyQueue[WorkerId], worker: WorkerId) -> None:
        """Begin with nothing.

        Args:
            queue: what waits.
            worker: the worker that runs the jobs.
        """
        self._queue = queue
        self._worker = worker
        self._batches: BatchRunner | None = None
        if queue.runner.has_batches and not queue.is_async:
            self._batches = BatchRunner(queue.runner, queue.ready)
        self._shows = queue.is_async or bool(queue.limits)
        """Whether others see any of the jobs while they run."""
        self._job: ClaimedJob | None = None
        """The job that runs now."""
        self._lane: Lane | None = None
        """The lane that the worker goes through."""
        self._turn: Turn | None = None
        """The turn that it has."""

    def take(self) -> ClaimedJob | None:
        """Begin the next job; None if nothing is left, or no job may begin."""
        queue = self._queue
        while not queue.stopping:
            if self._lane is not None:
                job = self._take_of_lane(self._lane)
            elif self._turn is not None:
                job = self._take_of_turn(self._turn)
            else:
                try:
                    item = queue.ready.popleft()
                except IndexError:
                    return None
                if self._batches is not None:
                    begun = self._batches.run(item)
                    if begun is not None:
                        queue.ran += begun
                        continue
                if isinstance(item, ClaimedJob):
                    job = item
                elif isinstance(item, Lane):
                    self._lane = item
                    continue
                else:
                    self._turn = queue.turns[self._worker] = item
                    continue
            if job is None:
                continue
            # This runs for each job, so it calls as little as it can.
            self._job = job
            lane = job.lane
            job.started = True
            queue.ran += 1
            # The same as `lane.is_over()`.
            job.began = monotonic()
            if lane.dropped or job.began >= lane.lease.until:
                goes_on = lane.finished.drop(job)
            elif job.cancel_requested:
                goes_on = lane.finished.add(job, queue.runner.cancelled(job))
            else:
                if self._shows:
                    self._show(job)
                return job
            self._job = None
            if not goes_on:
                self._stop_lane()
        self._end_lane()
        self._end_turn()
        return None

    def end(self, job: ClaimedJob, outcome: Outcome | None) -> bool:
        """Note how the job has ended; None is completed.

        Returns False if its attempt was given up before, and another worker has taken
        this one's place.
        """
        if self._shows and not self._hide(job):
            self._queue.runner.loans.forget(job)
            self._job = self._lane = self._turn = None
            return False
        goes_on = job.lane.finished.add(job, outcome)
        self._job = None
        if not goes_on:
            self._stop_lane()
        return True

    def fail(self, error: BaseException) -> None:
        """Let what runs now fail: an error from outside has hit the worker."""
        job, lane = self._job, self._lane
        if job is not None and not self._hide(job) and job.timed_out:
            # The attempt was given up, and its lane ended with it.
            self._queue.runner.loans.forget(job)
            lane = None
        elif job is not None:
            # If its outcome is written already, this one changes nothing.
            job.lane.finished.add(job, self._queue.runner.fail(job, error))
        if lane is not None:
            lane.failed = True
            lane.finished.end_lane(lane)
        if turn := self._queue.turns.pop(self._worker, None):
            turn.abort()
        self._job = self._lane = self._turn = None

    def _show(self, job: ClaimedJob) -> None:
        """Let others see the job while it runs, if they may have to end it."""
        queue = self._queue
        limit = queue.limits.get(job.type)
        if limit is None and not queue.is_async:
            return
        queue.running[job] = self._worker
        if limit is not None:
            job.deadline = job.began + limit
            queue.watch()

    def _hide(self, job: ClaimedJob) -> bool:
        """Let others see it no more; False if its attempt was given up meanwhile."""
        queue = self._queue
        if queue.is_async or job.type in queue.limits:
            return queue.running.pop(job, None) is not None
        return True

    def _take_of_lane(self, lane: Lane) -> ClaimedJob | None:
        """Take the next job of the lane; None if the worker leaves it."""
        queue = self._queue
        if lane.dropped:
            self._end_lane()
            return None
        try:
            job = lane.jobs.popleft()
        except IndexError:
            self._end_lane()
            return None
        if queue.runner.is_async(job) is not queue.is_async:
            lane.jobs.appendleft(job)
            self._lane = None
            queue.pass_on(lane)
            return None
        return job

    def _take_of_turn(self, turn: Turn) -> ClaimedJob | None:
        """Take the next job of the turn; None for a lane, or if the turn ends."""
        queue = self._queue
        if queue.ready and turn.is_long():
            queue.ready.append(turn)
            self._end_turn()
            return None
        item = turn.take()
        if isinstance(item, ClaimedJob):
            return item
        if item is None:
            self._end_turn()
        self._lane = item
        return None

    def _stop_lane(self) -> None:
        """What is left of the lane waits, as its group does."""
        if self._lane is not None:
            self._lane.failed = True
            self._end_lane()

    def _end_lane(self) -> None:
        lane = self._lane
        if lane is not None:
            lane.finished.add_lane(lane)
            if lane.failed or not self._queue.ready:
                lane.finished.wake()
            self._lane = None

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._queue.turns.pop(self._worker, None)
            self._turn = None
