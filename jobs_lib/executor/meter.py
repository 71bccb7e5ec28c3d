"""Counts the jobs' outcomes, and how long they take, for the metrics."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs_lib.executor.lane import ClaimedJob

BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds of the buckets, in seconds; one more bucket is for longer times."""


@dataclass(slots=True)
class Histogram:
    """A histogram: how many jobs took how long."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    """The count of each bucket, not cumulative."""
    total: float = 0.0
    """The sum of all seconds."""

    def note(self, seconds: list[float], shift: float = 0.0) -> None:
        """Add these durations, each ``shift`` seconds longer."""
        if not seconds:
            return
        shortest, longest = min(seconds) + shift, max(seconds) + shift
        if shortest < 0.0:
            # By two clocks a job may seem to begin before it was due.
            self.note([max(0.0, one + shift) for one in seconds])
            return
        self.total += sum(seconds) + shift * len(seconds)
        # Most are alike: the shortest and the longest often share one bucket.
        bucket = bisect_left(BOUNDS, shortest)
        if bucket == bisect_left(BOUNDS, longest):
            self.counts[bucket] += len(seconds)
        else:
            longer = [one + shift for one in seconds if one + shift > BOUNDS[bucket]]
            self.counts[bucket] += len(seconds) - len(longer)
            self._note_sorted(sorted(longer))

    def _note_sorted(self, seconds: list[float]) -> None:
        before = 0
        for bucket, bound in enumerate(BOUNDS):
            place = bisect_right(seconds, bound, before)
            self.counts[bucket] += place - before
            if place == len(seconds):
                break
            before = place
        else:
            self.counts[-1] += len(seconds) - before

    def add(self, other: Histogram) -> None:
        """Add the counts of another histogram."""
        pairs = zip(self.counts, other.counts, strict=True)
        self.counts = [own + more for own, more in pairs]
        self.total += other.total


class Meter:
    """The figures of one dispatcher's jobs: its thread writes, any thread may read."""

    def __init__(self) -> None:
        self.finished: dict[tuple[str, str], int] = defaultdict(int)
        """Written outcomes, by type and result."""
        self.durations: dict[str, Histogram] = defaultdict(Histogram)
        """From a handler's start to its end, by type."""
        self.delays: dict[str, Histogram] = defaultdict(Histogram)
        """From the time at which a job was due to its handler's start, by type."""
        self._written: list[tuple[str, Sequence[ClaimedJob]]] = []
        self._ended: list[Sequence[ClaimedJob]] = []

    def add_written(self, result: str, jobs: Sequence[ClaimedJob]) -> None:
        """Outcomes of these jobs are written."""
        self._written.append((result, jobs))

    def add_ended(self, jobs: Sequence[ClaimedJob]) -> None:
        """The handlers of these jobs have ended."""
        self._ended.append(jobs)

    def measure(self) -> None:
        """Count the jobs that were added; called when nobody waits for the thread."""
        for result, jobs in self._written:
            for name, of_type in _split(jobs):
                self.finished[name, result] += len(of_type)
        for jobs in self._ended:
            self._time(jobs)
        self._written, self._ended = [], []

    def _time(self, jobs: Sequence[ClaimedJob]) -> None:
        # The database's clock is not ours; their difference counts as delay.
        offset = time.time() - time.monotonic()
        for name, of_type in _split(jobs):
            self.durations[name].note([job.ended - job.began for job in of_type])
            waited = [
                job.began
                - (job.enqueued if job.run_at is None else job.run_at.timestamp())
                for job in of_type
            ]
            self.delays[name].note(waited, offset)


def _split(jobs: Sequence[ClaimedJob]) -> list[tuple[str, Sequence[ClaimedJob]]]:
    """The jobs by their type; most often there is one type."""
    types = {job.type for job in jobs}
    if len(types) == 1:
        return [(types.pop(), jobs)]
    return [(name, [job for job in jobs if job.type == name]) for name in types]
