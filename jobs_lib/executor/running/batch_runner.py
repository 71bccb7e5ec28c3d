"""Run several waiting jobs of one type in one call of its handler."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from jobs_lib.executor.lane import Lane, get_head
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
        size = self._runner.batch_size(get_head(item))
        if size == 1:
            return None
        jobs, lanes = self._collect(item, size)
        jobs = _begin(jobs)
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

    def _collect(self, item: Item, size: int) -> tuple[list[ClaimedJob], list[Lane]]:
        """Take jobs of the item's type, and the lanes that they are from."""
        wanted = get_head(item).type
        jobs: list[ClaimedJob] = []
        lanes: list[Lane] = []
        while True:
            if isinstance(item, Lane):
                lanes.append(item)
                while item.jobs and item.jobs[0].type == wanted and len(jobs) < size:
                    jobs.append(item.jobs.popleft())
            else:
                jobs.append(item)
            if len(jobs) == size:
                return jobs, lanes
            try:
                following = self._ready.popleft()
            except IndexError:
                return jobs, lanes
            if isinstance(following, Turn) or get_head(following).type != wanted:
                self._ready.appendleft(following)
                return jobs, lanes
            item = following

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
