"""When executors are told of a new job: not for each, since NOTIFY is dear.

Every NOTIFY takes one lock of the whole server at commit. Executors poll anyway: a hint
that is left out costs a job some milliseconds, and never the job.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL = 0.005
"""Seconds between two hints: for the same origin at least, for all on average."""
_BURST = 8
EVERYWHERE = ""
"""The hint that any origin may have new jobs."""


class Hints:
    """Decides, for one process, which enqueue carries a hint."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._at: dict[str, float] = {}
        # When all that were given would be used up, at one per interval.
        self._used_up_at = 0.0
        self._left_out = False

    def choose(self, origin: str) -> str | None:
        """The hint for a job of this origin; None for no hint now."""
        now = self._clock()
        if now - self._at.get(origin, -1.0) < INTERVAL:
            return None
        if self._used_up_at - now > (_BURST - 1) * INTERVAL:
            # Too many origins at once: the next hint is for all of them.
            self._left_out = True
            return None
        self._used_up_at = max(self._used_up_at, now) + INTERVAL
        self._at[origin] = now
        if self._left_out:
            self._left_out = False
            return EVERYWHERE
        return origin
