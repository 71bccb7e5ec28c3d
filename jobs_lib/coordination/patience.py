"""How long something is waited for, in a process that may stand still meanwhile."""

from __future__ import annotations

from jobs_lib.coordination.writer import read_clock

PIECE = 0.5
"""Seconds after which a wait looks again, so that a stop of the process is noticed."""
_STOP = 5.0


class Patience:
    """The seconds of a wait that are left.

    A process that was stopped has neither asked nor read. So one stop takes a few of
    the seconds at most, however long it was. Look at it every `PIECE` seconds or so.

    Args:
        seconds: to wait.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked_at = read_clock()

    @property
    def is_over(self) -> bool:
        """Whether none are left."""
        before, self._looked_at = self._looked_at, read_clock()
        self._left -= min(self._looked_at - before, _STOP)
        return self._left <= 0
