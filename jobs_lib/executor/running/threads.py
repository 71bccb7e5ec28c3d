"""Threads that run plain handlers."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.executor.running.lane_runner import LaneRunner
from jobs_lib.executor.running.ready_queue import ReadyQueue
from jobs_lib.telemetry.stacks import read_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jobs_lib.executor.lane import Item, Lane
    from jobs_lib.executor.limiting.turn import Turn
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
        self._starving = starving
        self._condition = threading.Condition()
        self._idle = 0
        self._threads: dict[int, threading.Thread] = {}
        """The threads, except those that still run jobs that were given up."""
        self._watching = threading.Event()
        self._stopping = threading.Event()
        self._queue: ReadyQueue[int] = ReadyQueue(
            runner, limits, pass_on, self._watching.set, is_async=False
        )
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
        self._queue.stop()
        self._watching.set()
        with self._condition:
            self._condition.notify_all()

    @property
    def ran(self) -> int:
        """The number of jobs that were begun."""
        return self._queue.ran

    @property
    def is_starving(self) -> bool:
        """Whether no job waits to be run."""
        return not self._queue.ready

    @property
    def idle(self) -> int:
        """Threads that have nothing to run."""
        return self._idle

    def put(self, items: Sequence[Item | Turn], *, first: bool = False) -> None:
        """Run these in this order: ``first``, or after those that wait."""
        self._queue.put(items, first=first)
        with self._condition:
            if self._idle == self.count:
                self._condition.notify(1)
        self._watching.set()

    def take_back(self) -> list[Item | Turn]:
        """Take everything back that no thread has begun."""
        return self._queue.take_back()

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
        lane_runner = LaneRunner(self._queue, threading.get_ident())
        take, end, run = lane_runner.take, lane_runner.end, self._runner.run
        try:
            while True:
                job = take()
                if job is not None:
                    if not end(job, run(job)):
                        return
                elif self._queue.stopping:
                    return
                else:
                    self._wait()
        except BaseException as error:
            lane_runner.fail(error)
            raise

    def _wait(self) -> None:
        self._starving()
        with self._condition:
            self._idle += 1
            try:
                self._condition.wait_for(
                    lambda: self._queue.ready or self._stopping.is_set()
                )
            finally:
                self._idle -= 1

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
        ready, timed = self._queue.ready, self._queue.running
        while (ready or timed) and not self._stopping.is_set():
            ran = self.ran
            self._stopping.wait(_TICK if ready else _LIMIT_TICK)
            if ready and self._idle and self.ran - ran < _QUICK:
                with self._condition:
                    self._condition.notify_all()
            if timed:
                self._watch_limits()

    def _watch_limits(self) -> None:
        now = time.monotonic()
        for job, thread in list(self._queue.running.items()):
            if now < job.deadline:
                continue
            stack = read_stack(thread)
            if self._queue.give_up(thread, job):
                self._threads.pop(thread, None)
                telemetry.emit("job.stuck", job=job, stack=stack)
                self._add_thread()
