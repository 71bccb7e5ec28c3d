"""Threads that run lanes."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from jobs_lib.jobs.model import Job, Lane, Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jobs_lib.jobs.claim import Item

_TICK = 0.002
_QUICK = 20
"""Jobs that quick handlers end at least in a tick."""
_STOPS_LANE = {Result.RETRIED, Result.SNOOZED, Result.FENCED}


class Workers:
    """Runs jobs on threads: on as many as it takes.

    While jobs are quick one thread runs them all: Python runs one thread at a time, and
    every switch costs more than a quick job. A watcher wakes all threads as soon as jobs
    wait while the running ones do not end, which is what a job does that waits for
    somebody else.
    """

    def __init__(
        self,
        count: int,
        run: Callable[[Job], Outcome | None],
        wake: Callable[[], None],
    ) -> None:
        self.completed: deque[Job] = deque()
        """Jobs that ran to their end, to be settled."""
        self.outcomes: deque[Outcome] = deque()
        """What became of the others."""
        self.ended_lanes: deque[Lane] = deque()
        self.wake_at = 1
        """So many completed jobs are worth a round trip."""
        self._run = run
        self._wake = wake
        self._ready: deque[Job | Lane] = deque()
        self._condition = threading.Condition()
        self._idle = 0
        self._ran = 0
        self._watching = threading.Event()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._work, name=f"jobs_lib worker {n}", daemon=True
            )
            for n in range(count)
        ]
        self._threads.append(
            threading.Thread(target=self._watch, name="jobs_lib watcher", daemon=True)
        )

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Start nothing more; what runs is left alone."""
        self._stopping.set()
        self._ready.clear()
        self._watching.set()
        with self._condition:
            self._condition.notify_all()

    @property
    def is_starving(self) -> bool:
        """Whether nothing waits to be run."""
        return not self._ready

    def put(self, items: Iterable[Job | Lane]) -> None:
        """Run these, in this order."""
        self._ready.extend(items)
        with self._condition:
            if self._idle == len(self._threads) - 1:
                self._condition.notify(1)
        self._watching.set()

    def take_back(self) -> list[Job | Lane]:
        """What no thread has begun, the last first."""
        taken: list[Job | Lane] = []
        while True:
            try:
                taken.append(self._ready.pop())
            except IndexError:
                return taken

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                item = self._ready.popleft()
            except IndexError:
                self._wake()
                with self._condition:
                    self._idle += 1
                    self._condition.wait_for(
                        lambda: self._ready or self._stopping.is_set()
                    )
                    self._idle -= 1
                continue
            if type(item) is Job:
                self._run_job(item)
            else:
                self._run_lane(item)

    def _run_job(self, job: Job) -> Outcome | None:
        job.started = True
        self._ran += 1
        if job.lane.dropped:
            return None
        outcome = self._run(job)
        if outcome is None:
            self.completed.append(job)
            if len(self.completed) >= self.wake_at:
                self._wake()
        else:
            self.outcomes.append(outcome)
            self._wake()
        return outcome

    def _run_lane(self, lane: Lane) -> None:
        jobs = lane.jobs
        while not lane.dropped and not self._stopping.is_set():
            try:
                job = jobs.popleft()
            except IndexError:
                break
            outcome = self._run_job(job)
            # What is behind a job that waits for another attempt waits with it.
            if outcome is not None and outcome.result in _STOPS_LANE:
                lane.failed = True
                break
        self.ended_lanes.append(lane)
        if lane.failed or not self._ready:
            self._wake()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._watching.wait()
            self._watching.clear()
            while self._ready and not self._stopping.is_set():
                ran = self._ran
                self._stopping.wait(_TICK)
                if self._ready and self._idle and self._ran - ran < _QUICK:
                    with self._condition:
                        self._condition.notify_all()
