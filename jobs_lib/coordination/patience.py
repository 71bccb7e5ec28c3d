"""Waits of a process that may stand still meanwhile, and how it notices that."""

from __future__ import annotations

import math
import time

PIECE = 0.5
"""Seconds after which a wait looks again, so that a stop of the process is noticed."""
_STOP = 5.0


def read_clock() -> float:
    """Read this machine's clock of elapsed time: it goes on while a machine sleeps."""
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Patience:
    """The seconds of a wait that are left.

    A process that was stopped has neither asked nor read. So one stop takes a few of
    the seconds at most, however long it was. Look at it every `PIECE` seconds or so.

    Args:
        seconds: to wait.
        stop: the most that one stop takes; not less than the time between two looks.
    """

    def __init__(self, seconds: float, stop: float = _STOP) -> None:
        self._left = seconds
        self._stop = stop
        self._looked_at = read_clock()

    @property
    def is_over(self) -> bool:
        """Whether none are left."""
        before, self._looked_at = self._looked_at, read_clock()
        self._left -= min(self._looked_at - before, self._stop)
        return self._left <= 0


class Standstill:
    """Notices that a thread stood still: its whole process, or it alone.

    Args:
        seconds: between two notes that mean a standstill.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._noted_at = read_clock()
        self._ended_at = -math.inf

    def note(self) -> None:
        """Note, in that thread, that it goes on."""
        self._ended_at = self.ended_at
        self._noted_at = read_clock()

    @property
    def ended_at(self) -> float:
        """When the last standstill ended; now, if one has not; or before all time."""
        now = read_clock()
        return now if now - self._noted_at >= self._seconds else self._ended_at
