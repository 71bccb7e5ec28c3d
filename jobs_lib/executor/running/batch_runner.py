"""Run several waiting jobs of one type in one call of its handler."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from jobs_lib.executor.lane import Lane, find_head
from jobs_lib.executor.limiting.turn import Turn

if TYPE_CHECKING:
    from collections import deque

    from jobs_lib.executor.lane import ClaimedJob, Item
    from jobs_lib.executor.running.runner import Runner


class BatchRunner:
    """Collects jobs of one type from what waits; used by many threads at once."""

    def __init__(self, runner: Runner, ready: deque[Item | Turn]) -> None:
        """Prepare.

        Args:
            runner: calls the handlers.
            ready: what waits for a worker.
        """
        self._runner = runner
        self._ready = ready

    def run(self, item: Item | Turn) -> int | None:
        """Run an item with others of its type.

        Returns the number of jobs that were begun, or None if the type wants no
        batches.
        """
        if isinstance(item, Turn):
            return None
        head = find_head(item)
        if head is None:
            # An empty lane, which has ended.
            return None
        size = self._runner.batch_size(head)
        if size == 1:
            return None
        jobs, lanes = self._collect(item, head.type, size)
        jobs = self._begin(jobs)
        try:
            self._run_together(jobs)
        except BaseException as error:
            for job in jobs:
                job.lane.finished.add(job, self._runner.fail(job, error))
            for lane in lanes:
                lane.failed = True
                lane.finished.end_lane(lane)
            raise
        for lane in lanes:
            if lane.failed or lane.dropped or not lane.jobs:
                lane.finished.end_lane(lane)
            else:
                self._ready.append(lane)
        return len(jobs)

    def _collect(
        self, item: Item, wanted: str, size: int
    ) -> tuple[list[ClaimedJob], list[Lane]]:
        """Take jobs of the wanted type, and the lanes that they are from."""
        jobs: list[ClaimedJob] = []
        lanes: list[Lane] = []
        while True:
            if isinstance(item, Lane):
                lanes.append(item)
                _take_of_lane(item, wanted, jobs, size)
            else:
                jobs.append(item)
            if len(jobs) == size:
                return jobs, lanes
            try:
                following = self._ready.popleft()
            except IndexError:
                return jobs, lanes
            head = None if isinstance(following, Turn) else find_head(following)
            # An empty lane is taken along, and ends with the others.
            if isinstance(following, Turn) or (head and head.type != wanted):
                self._ready.appendleft(following)
                return jobs, lanes
            item = following

    def _begin(self, jobs: list[ClaimedJob]) -> list[ClaimedJob]:
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
        begun = [job for job in jobs if id(job.lane) not in over]
        if any(job.cancel_requested for job in begun):
            return self._leave_cancelled(begun)
        return begun

    def _leave_cancelled(self, jobs: list[ClaimedJob]) -> list[ClaimedJob]:
        """End jobs that were cancelled before they began; returns the others.

        In a group, a cancelled job behind others waits for the next call, and those
        behind it with it: it may end only when those ahead of it have ended well.
        """
        begun: list[ClaimedJob] = []
        behind: list[ClaimedJob] = []
        ahead: set[int] = set()
        halted: set[int] = set()
        for job in jobs:
            lane = id(job.lane)
            if lane in halted:
                behind.append(job)
            elif not job.cancel_requested:
                begun.append(job)
                ahead.add(lane)
            elif job.group is not None and lane in ahead:
                halted.add(lane)
                behind.append(job)
            elif not job.lane.finished.add(job, self._runner.cancelled(job)):
                halted.add(lane)
                job.lane.failed = True
        for job in reversed(behind):
            job.started = False
            job.lane.jobs.appendleft(job)
        return begun

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


def _take_of_lane(lane: Lane, wanted: str, jobs: list[ClaimedJob], size: int) -> None:
    while len(jobs) < size:
        # Its dispatcher may shorten the lane meanwhile.
        try:
            job = lane.jobs.popleft()
        except IndexError:
            return
        if job.type != wanted:
            lane.jobs.appendleft(job)
            return
        jobs.append(job)
