"""How many jobs an executor may have in flight."""

from __future__ import annotations

import time

_HORIZON = 0.1
"""Seconds, of the quickest jobs."""
_HALF = 1_000
"""Jobs a second of which as many are claimed as end in half of that time."""
_SHORTEST = 0.005


class Pace:
    """Claim what the workers finish in a tenth of a second at most.

    Quick jobs come in large batches, which is fast. Of slow ones hardly more are
    claimed than run: a crash then is none of their neighbours' business, a hand-over
    waits for few, and what another process could run is not hoarded here. And what
    comes next waits for few: behind a tenth of a second of jobs that commit by
    themselves it would wait for that long, each time that an origin comes with a
    backlog.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least = max(1, min(least, most))
        self.most = most
        """Jobs that may ever be in flight."""
        self._ended = 0
        self._since = time.monotonic()
        self.limit = self._least
        """Jobs that may be in flight."""

    def note(self, ended: int) -> None:
        """So many jobs have ended since the last call."""
        self._ended += ended
        now = time.monotonic()
        took = now - self._since
        if took < _SHORTEST:
            return
        rate = self._ended / took
        target = int(rate * _HORIZON * rate / (rate + _HALF))
        # It falls by halves: one pause of the machine is not the pace of the jobs.
        target = max(target, self.limit // 2)
        self.limit = max(self._least, min(self.most, target))
        self._ended, self._since = 0, now
