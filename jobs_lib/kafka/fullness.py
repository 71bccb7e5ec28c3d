"""For how long records that wait in memory have had no room."""

from __future__ import annotations

import time

_SECONDS = 0.5


class Fullness:
    """Says when what waits has been too much for long.

    Until then nothing is polled, and Kafka's client keeps what it has fetched. After
    that, partitions are paused, which throws it away: that is done as rarely as this.

    Args:
        most: the bytes that may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._since: float | None = None

    def lasts(self, waiting: int) -> bool:
        """Whether so many bytes have been too many for half a second; then anew."""
        if waiting < self._most:
            self._since = None
            return False
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now < self._since + _SECONDS:
            return False
        self._since = None
        return True
