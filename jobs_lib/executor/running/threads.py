"""Threads that run plain handlers."""

from __future__ import annotations

import threading
import time
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.executor.lane import ClaimedJob, Lane
from jobs_lib.executor.limiting.turn import Turn
from jobs_lib.executor.running.watchdog import read_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jobs_lib.executor.lane import Item
    from jobs_lib.executor.running.runner import Runner

_TICK = 0.002
_QUICK = 20
"""Quick handlers end at least this many jobs in a tick."""
_LIMIT_TICK = 0.02


class ThreadWorkers:
    """Runs jobs on threads, on as many as it needs.

    While jobs are quick, one thread runs them all: Python runs one thread at a time,
    and every switch costs more than a quick job. A job that waits for another system
    does not end soon. So if jobs wait and the running ones do not end, a watcher wakes
    all threads.
    """

    def __init__(
        self,
        count: int,
        runner: Runner,
        limits: Mapping[str, float],
        starving: Callable[[], None],
        pass_on: Callable[[Lane], None],
    ) -> None:
        """Make the threads.

        Args:
            count: the number of threads.
            runner: runs one job.
            limits: the time limits of types that have one, in seconds.
            starving: called when there is nothing left to run.
            pass_on: takes a lane whose next job is not for these threads.
        """
        self._runner = runner
        self._limits = limits
        self._starving = starving
        self._pass_on = pass_on
        self._ready: deque[Item | Turn] = deque()
        self._turns: dict[int, Turn] = {}
        """Running turns, by the thread that runs them."""
        self._condition = threading.Condition()
        self._idle = 0
        self.ran = 0
        """The number of jobs that were begun."""
        self._timed: dict[int, ClaimedJob] = {}
        """Running jobs with a time limit, by the thread that runs them."""
        self._threads: dict[int, threading.Thread] = {}
        """The threads, except those that still run jobs that were given up."""
        self._watching = threading.Event()
        self._stopping = threading.Event()
        self.count = count
        self._names = iter(range(1_000_000))
        self._watcher = threading.Thread(
            target=self._watch, name="jobs_lib watcher", daemon=True
        )

    def start(self) -> None:
        """Start the threads."""
        for _ in range(self.count):
            self._add_thread()
        self._watcher.start()

    def stop(self) -> None:
        """Start no more jobs; running ones are left alone."""
        self._stopping.set()
        self._ready.clear()
        self._watching.set()
        with self._condition:
            self._condition.notify_all()

    @property
    def is_starving(self) -> bool:
        """Whether no job waits to be run."""
        return not self._ready

    @property
    def idle(self) -> int:
        """Threads that have nothing to run."""
        return self._idle

    def put(self, items: Sequence[Item | Turn], *, first: bool = False) -> None:
        """Run these in this order: ``first``, or after those that wait."""
        if first:
            self._ready.extendleft(reversed(items))
        else:
            self._ready.extend(items)
        with self._condition:
            if self._idle == self.count:
                self._condition.notify(1)
        self._watching.set()

    def take_back(self) -> list[Item | Turn]:
        """Take everything back that no thread has begun."""
        taken: list[Item | Turn] = []
        while True:
            try:
                taken.append(self._ready.pop())
            except IndexError:
                return taken

    @property
    def living(self) -> int:
        """The threads that run jobs or can do so; 0 if the watcher has ended."""
        if not self._watcher.is_alive():
            return 0
        return sum(thread.is_alive() for thread in list(self._threads.values()))

    def _add_thread(self) -> None:
        name = f"jobs_lib worker {next(self._names)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        thread.start()
        self._threads[thread.ident or 0] = thread

    def _work(self) -> None:
        try:
            self._work_off()
        # A handler's error does not get here: this one came from outside, or is ours.
        except BaseException as error:
            thread = threading.current_thread()
            self._threads.pop(threading.get_ident(), None)
            if not self._stopping.is_set():
                self._add_thread()
            telemetry.emit("thread.ended", thread=thread.name, error=error)

    def _work_off(self) -> None:
        while not self._stopping.is_set():
            try:
                item = self._ready.popleft()
            except IndexError:
                self._starving()
                with self._condition:
                    self._idle += 1
                    try:
                        self._condition.wait_for(
                            lambda: self._ready or self._stopping.is_set()
                        )
                    finally:
                        self._idle -= 1
                continue
            if self._runner.has_batches and self._run_batch(item):
                continue
            if isinstance(item, ClaimedJob):
                going = self._run(item)
            elif isinstance(item, Lane):
                going = self._run_lane(item)
            else:
                going = self._run_turn(item)
            if going is None:
                return  # another thread has taken this one's place

    def _run_turn(self, turn: Turn) -> bool | None:
        """Run the jobs that wait behind a limit, one after the other."""
        thread = threading.get_ident()
        self._turns[thread] = turn
        try:
            while not self._stopping.is_set():
                item = turn.take()
                if item is None:
                    break
                going = (
                    self._run(item)
                    if isinstance(item, ClaimedJob)
                    else self._run_lane(item)
                )
                if going is None:
                    return None
                if self._ready and turn.is_long():
                    self._ready.append(turn)
                    break
        except BaseException:
            if self._turns.pop(thread, None):
                turn.abort()
            raise
        self._turns.pop(thread, None)
        return True

    def _run(self, job: ClaimedJob) -> bool | None:
        """Run a job; returns whether its group may go on, None if its time was over."""
        lane = job.lane
        try:
            job.started = True
            self.ran += 1
            # The same as `lane.is_over()`, without a call for each job.
            job.began = monotonic()
            if lane.dropped or job.began >= lane.lease.until:
                return lane.finished.drop(job)
            if job.cancel_requested:
                return lane.finished.add(job, self._runner.cancelled(job))
            limit = self._limits.get(job.type) if self._limits else None
            if limit is None:
                return lane.finished.add(job, self._runner.run(job))
            thread = threading.get_ident()
            job.deadline = time.monotonic() + limit
            self._timed[thread] = job
            self._watching.set()
            outcome = self._runner.run(job)
            if self._timed.pop(thread, None) is None:
                return None  # the watcher has ended it, so its effects are refused
            return lane.finished.add(job, outcome)
        except BaseException as error:
            # If its outcome is written already, this one changes nothing.
            self._timed.pop(threading.get_ident(), None)
            if not job.timed_out:
                lane.finished.add(job, self._runner.fail(job, error))
            raise

    def _run_lane(self, lane: Lane) -> bool | None:
        try:
            return self._run_through(lane)
        except BaseException:
            lane.failed = True
            lane.finished.add_lane(lane)
            lane.finished.wake()
            raise

    def _run_through(self, lane: Lane) -> bool | None:
        jobs = lane.jobs
        while not lane.dropped and not self._stopping.is_set():
            try:
                job = jobs.popleft()
            except IndexError:
                break
            if self._runner.is_async(job):
                jobs.appendleft(job)
                self._pass_on(lane)
                return True
            going = self._run(job)
            if going is None:
                return None
            if not going:
                lane.failed = True
                break
        lane.finished.add_lane(lane)
        if lane.failed or not self._ready:
            lane.finished.wake()
        return True

    def _run_batch(self, item: Item | Turn) -> bool:
        """Run it with others of its type in one call; False if it needs no batch."""
        if isinstance(item, Turn):
            return False
        head = item if isinstance(item, ClaimedJob) else item.jobs[0]
        size = self._runner.batch_size(head)
        if size == 1:
            return False
        jobs: list[ClaimedJob] = []
        lanes: list[Lane] = []
        while True:
            if isinstance(item, Lane):
                lanes.append(item)
                while item.jobs and item.jobs[0].type == head.type and len(jobs) < size:
                    jobs.append(item.jobs.popleft())
            else:
                jobs.append(item)
            if len(jobs) == size:
                break
            try:
                following = self._ready.popleft()
            except IndexError:
                break
            if isinstance(following, Turn) or _get_type(following) != head.type:
                self._ready.appendleft(following)
                break
            item = following
        jobs = _begin(jobs)
        self.ran += len(jobs)
        try:
            self._run_together(jobs)
        except BaseException as error:
            for job in jobs:
                job.lane.finished.add(job, self._runner.fail(job, error))
            for lane in lanes:
                lane.failed = True
                lane.finished.add_lane(lane)
                lane.finished.wake()
            raise
        for lane in lanes:
            if lane.failed or lane.dropped or not lane.jobs:
                lane.finished.add_lane(lane)
                lane.finished.wake()
            else:
                self._ready.append(lane)
        return True

    def _run_together(self, jobs: list[ClaimedJob]) -> None:
        for job, outcome in zip(jobs, self._runner.run_batch(jobs), strict=True):
            lane = job.lane
            if job.group is not None and lane.failed and not job.completed:
                # It is behind a failed job of its group, and must keep the order.
                job.started = False
                lane.jobs.append(job)
                continue
            if not lane.finished.add(job, outcome) and job.group is not None:
                lane.failed = True

    # The watcher's thread

    def _watch(self) -> None:
        while not self._stopping.is_set():
            try:
                self._watching.wait()
                self._watching.clear()
                self._watch_running()
            except BaseException as error:
                telemetry.emit("thread.ended", thread="jobs_lib watcher", error=error)
                self._watching.set()

    def _watch_running(self) -> None:
        while (self._ready or self._timed) and not self._stopping.is_set():
            ran = self.ran
            self._stopping.wait(_TICK if self._ready else _LIMIT_TICK)
            if self._ready and self._idle and self.ran - ran < _QUICK:
                with self._condition:
                    self._condition.notify_all()
            if self._timed:
                self._watch_limits()

    def _watch_limits(self) -> None:
        now = time.monotonic()
        for thread, job in list(self._timed.items()):
            if now < job.deadline or self._timed.pop(thread, None) is None:
                continue
            # A thread cannot be stopped. Its work can no longer commit, because the
            # attempt is over in the database; another thread takes its place.
            job.timed_out = True
            self._threads.pop(thread, None)
            telemetry.emit("job.stuck", job=job, stack=read_stack(thread))
            job.lane.finished.add(job, self._runner.time_out(job))
            if turn := self._turns.pop(thread, None):
                turn.abort()
            if job.group is not None:
                job.lane.failed = True
                job.lane.finished.add_lane(job.lane)
                job.lane.finished.wake()
            self._add_thread()


def _get_type(item: Item) -> str:
    return item.type if isinstance(item, ClaimedJob) else item.jobs[0].type


def _begin(jobs: list[ClaimedJob]) -> list[ClaimedJob]:
    """Start the jobs of a batch that may begin; returns those."""
    now = monotonic()
    for job in jobs:
        job.started, job.began = True, now
    # Check once for each lane: all jobs of a group may begin, or none.
    lanes = {id(job.lane): job.lane for job in jobs}
    over = {key for key, lane in lanes.items() if lane.is_over()}
    for job in jobs:
        if id(job.lane) in over:
            job.lane.failed = job.group is not None
            job.lane.finished.drop(job)
    return [job for job in jobs if id(job.lane) not in over]
