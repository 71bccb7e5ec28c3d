"""Which enqueues send a hint to executors: not each, because NOTIFY is expensive.

Every NOTIFY takes one lock of the whole server at commit. Executors poll anyway, so a
missing hint delays a job by some milliseconds and never loses it.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL = 0.005
"""Seconds between hints: a minimum for one origin, an average over all."""
_BURST = 8
EVERYWHERE = ""
"""The hint that any origin may have new jobs."""


class Hints:
    """Decides, for one process, which enqueue carries a hint."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._at: dict[str, float] = {}
        # When the hints sent so far are paid for, at one per interval.
        self._used_up_at = 0.0
        self._left_out = False

    def choose(self, origin: str) -> str | None:
        """The hint to send for a job of this origin now; None for no hint."""
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
