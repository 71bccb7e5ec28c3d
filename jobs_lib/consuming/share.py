"""Whether blocks keep a thread at work, or let it wait for others."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

LONG_SECONDS = 0.2
"""How long a block is written before other threads write such blocks, too."""
_BUSY_SHARE = 0.6
"""From which share of its time on a thread is busy rather than waiting."""
_WAITED_BLOCKS = 3
"""How many blocks in a row tell that a thread waits: one may only have had bad luck."""
_MEASURED_SECONDS = 30.0
"""For how long a measure counts."""


@dataclass(slots=True, eq=False)
class Share:
    """How busy the blocks of a topic keep a thread.

    Two busy threads take turns with the interpreter, so that each seems to wait. So
    only a block that ran alone tells that its thread waits for others.
    """

    is_busy: bool | None = None
    """None while nobody knows."""
    measured_at: float = -math.inf
    size: int | None = None
    """The records of a block that takes as long as it should; None if nobody knows."""
    waited: int = 0
    """Blocks in a row whose thread waited for most of the time."""

    def note(
        self, count: int, seconds: float, worked: float, *, is_alone: bool
    ) -> None:
        """Note a block.

        Args:
            count: its records. A single one says nothing about many.
            seconds: how long it took.
            worked: how many of them its thread was at work.
            is_alone: whether no other block has run meanwhile.
        """
        now = time.monotonic()
        if count <= 1:
            if self.is_busy:
                self.is_busy = None
        elif worked > _BUSY_SHARE * seconds:
            self.is_busy, self.measured_at, self.waited = True, now, 0
        elif is_alone or (self.is_busy is None and seconds > LONG_SECONDS):
            self.waited += 1
            if self.waited >= _WAITED_BLOCKS:
                self.is_busy, self.measured_at = False, now
        elif self.is_busy is not None and now > self.measured_at + _MEASURED_SECONDS:
            self.is_busy, self.waited = None, 0
