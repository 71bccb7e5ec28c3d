"""How many rows of re-exports a block may have, and when they must wait."""

from __future__ import annotations

import math
import time

_LEAST_BATCH, _MOST_BATCH = 100, 1_000
"""Between these is the limit of the rows of re-exports in a block."""
_BLOCK_SECONDS = 0.1
"""How long a block with them should take while live rows come, which wait for it."""
_QUIET_SECONDS = 1.0
"""When no live row has come for so long, none is expected."""
_SPENT_SECONDS = 0.1
"""How long a re-export is passed over after its rate granted it too few records."""
_MOST_LEFT = 10_000
"""So many rows that must wait for live ones keep none behind them back."""


class BatchPace:
    """The pace of the rows of re-exports; the threads of a relay share it.

    Attributes:
        limit: how many of them the next block may have.
    """

    def __init__(self) -> None:
        self.limit = _LEAST_BATCH
        self._live_at = -math.inf
        """When a live row was read last."""
        self._spent_until: dict[int, float] = {}
        self._rests_until: dict[int, float] = {}
        self._left: dict[int, int] = {}

    def note_live(self) -> None:
        """Note that live rows come: they wait for each block."""
        self._live_at = time.monotonic()

    def note_block(self, rows: int, seconds: float) -> None:
        """Choose how many rows of re-exports the next block may have.

        It has twice as many as the last one if that was full, and while live rows come
        only as many as there is time for.

        Args:
            rows: of the last such block.
            seconds: that it took, from the read to the delete.
        """
        wanted = 2 * rows if rows >= self.limit else rows
        if time.monotonic() < self._live_at + _QUIET_SECONDS:
            wanted = min(wanted, int(rows * _BLOCK_SECONDS / max(seconds, 0.001)))
        self.limit = max(_LEAST_BATCH, min(wanted, _MOST_BATCH))

    def rest(self, shard: int) -> None:
        """Let the rows of a shard wait, since none of them could be sent."""
        self._rests_until[shard] = time.monotonic() + _SPENT_SECONDS

    def rests(self, shard: int) -> bool:
        """Whether no row of a re-export in a shard could be sent a moment ago."""
        return self._rests_until.get(shard, 0.0) > time.monotonic()

    def note_left(self, shard: int, rows: int) -> None:
        """Note how many of the rows that were read wait for live rows of their keys."""
        self._left[shard] = min(rows, _MOST_LEFT)

    def find_left(self, shard: int) -> int:
        """How many rows of the shard waited for live rows at the last read."""
        return self._left.get(shard, 0)

    def spend(self, reexport_id: int) -> None:
        """Pass a re-export over, since its rate granted it too few records."""
        self._spent_until[reexport_id] = time.monotonic() + _SPENT_SECONDS

    def find_spent(self) -> list[int]:
        """Re-exports whose rate allows no record yet."""
        now = time.monotonic()
        # Iterate over a copy: the relay threads share it.
        for reexport_id, until in [*self._spent_until.items()]:
            if until <= now:
                self._spent_until.pop(reexport_id, None)
        return [*self._spent_until]
