"""How many jobs an executor may have in flight."""

from __future__ import annotations

import time

_HORIZON = 0.1
"""For how many seconds of the quickest jobs to claim."""
_HALF = 1_000
"""The jobs a second at which claims cover only half of that time."""
_SHORTEST = 0.005


class Pace:
    """Claim at most the jobs that the workers finish in a tenth of a second.

    Quick jobs come in large batches, which is fast. Of slow jobs, hardly more are
    claimed than run. So a crash makes few other jobs suspects, a hand-over waits for
    few jobs, and other processes can run the rest. And new jobs wait for few others:
    behind a tenth of a second of jobs that commit by themselves they would wait for
    that long, each time that an origin comes with a backlog.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least = max(1, min(least, most))
        self.most = most
        """The most jobs that may ever be in flight."""
        self._ended = 0
        self._since = time.monotonic()
        self.limit = self._least
        """The most jobs that may be in flight now."""

    def note(self, ended: int) -> None:
        """Adapt to the number of jobs that have ended since the last call."""
        self._ended += ended
        now = time.monotonic()
        took = now - self._since
        if took < _SHORTEST:
            return
        rate = self._ended / took
        target = int(rate * _HORIZON * rate / (rate + _HALF))
        # It only halves at a time: one pause of the machine is not the jobs' pace.
        target = max(target, self.limit // 2)
        self.limit = max(self._least, min(self.most, target))
        self._ended, self._since = 0, now
