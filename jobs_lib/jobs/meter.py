"""Counts what becomes of jobs, and how long they take, for the metrics."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs_lib.jobs.model import Job

BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds of the buckets, in seconds; one more is for what took longer."""


@dataclass(slots=True)
class Histogram:
    """How many took how long."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    """Of each bucket, by itself."""
    total: float = 0.0
    """Seconds of all together."""

    def add(self, other: Histogram) -> None:
        """Count what another one has counted, too."""
        pairs = zip(self.counts, other.counts, strict=True)
        self.counts = [own + more for own, more in pairs]
        self.total += other.total


class Meter:
    """The figures of one dispatcher's jobs: its thread writes, and any may read."""

    def __init__(self) -> None:
        self.finished: dict[tuple[str, str], int] = defaultdict(int)
        """Written outcomes, by type and result."""
        self.durations: dict[str, Histogram] = defaultdict(Histogram)
        """From a handler's start to its end, by type."""
        self.delays: dict[str, Histogram] = defaultdict(Histogram)
        """From the time at which a job was due to its handler's start, by type."""

    def count(self, result: str, jobs: Iterable[Job]) -> None:
        """Outcomes of these jobs are written."""
        finished = self.finished
        for job in jobs:
            finished[job.type, result] += 1

    def time(self, jobs: Iterable[Job]) -> None:
        """The handlers of these jobs have ended."""
        # The database's clock is not ours; what they differ by is told as a delay.
        offset = time.time() - time.monotonic()
        durations, delays = self.durations, self.delays
        for job in jobs:
            began = job.began
            if not began:
                continue
            seconds = job.ended - began
            histogram = durations[job.type]
            histogram.counts[bisect_left(BOUNDS, seconds)] += 1
            histogram.total += seconds
            due = job.enqueued if job.run_at is None else job.run_at.timestamp()
            seconds = max(0.0, began + offset - due)
            histogram = delays[job.type]
            histogram.counts[bisect_left(BOUNDS, seconds)] += 1
            histogram.total += seconds
