"""How long something is waited for, in a process that may stand still meanwhile."""

from __future__ import annotations

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
