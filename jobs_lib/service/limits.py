"""The memory of a long-running process: how it is tuned, and when it is too much.

A process whose handlers leak memory ends in order.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jobs_lib import telemetry

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.settings import Settings

_COLLECT = 100_000, 10, 10
"""Objects that wait for the garbage collector: twenty blocks' rows."""
_MXFAST = 1
"""A parameter of mallopt(3): up to this size freed memory is kept apart."""


class ProcessLimits:
    """Compares what a process has used with what it may use."""

    def __init__(self, settings: Settings, ran: Callable[[], int]) -> None:
        """Prepare to compare.

        Args:
            settings: of these ``max_memory`` and ``max_jobs``.
            ran: says how many jobs the process has run.
        """
        self._max_memory = settings.max_memory
        self._max_jobs = settings.max_jobs
        self._ran = ran

    def is_over(self) -> bool:
        """Measure, emit the result, and say whether it is too much."""
        used = {"rss_mb": round(resident_mb(), 1), "jobs": self._ran()}
        telemetry.emit("process.measured", **used)
        worn = bool(
            (self._max_memory and used["rss_mb"] > self._max_memory)
            or (self._max_jobs and used["jobs"] >= self._max_jobs)
        )
        if worn:
            telemetry.emit("process.worn", **used)
        return worn


def resident_mb() -> float:
    """This process's memory in MiB; its peak if the present size is not known."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2 ** (20 if sys.platform == "darwin" else 10)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def tune_memory() -> None:
    """Prepare for many small objects that come and go; call it after the start."""
    # The objects of the start stay, and rows that are read make no cycles: the garbage
    # collector would visit all of those objects with every few hundred new rows.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT)
    # A record's dozen small pieces are freed together. glibc would keep each apart and
    # join all of them at each large allocation: a tenth of a relay's CPU time.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MXFAST, 0)
