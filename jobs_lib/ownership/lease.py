"""For how long a process may begin jobs: while no other can believe that it is dead."""

from __future__ import annotations

import math
import time

from jobs_lib.errors import JobsError

_MARGIN = 0.1
"""The share of ``stale_after`` that is kept back: for a start that is under way."""


class Lease:
    """The time in which this process counts as living; each heartbeat prolongs it.

    A job begins only while the lease lasts under which it was claimed. A lease that has
    run out stays so: others may have taken the origins over since, so whatever was
    claimed under it must be claimed anew.
    """

    __slots__ = ("until",)

    def __init__(self, until: float = math.inf) -> None:
        self.until = until
        """On the monotonic clock."""

    def is_over(self) -> bool:
        """Whether nothing that was claimed under it may begin any more."""
        return time.monotonic() >= self.until

    def renew(self, sent_at: float, stale_after: float) -> Lease:
        """A heartbeat is confirmed; returns the lease that holds from now on.

        Args:
            sent_at: when the heartbeat was sent. Its answer may come late.
            stale_after: seconds without a heartbeat after which others take over.
        """
        until = sent_at + stale_after * (1 - _MARGIN)
        if self.is_over():
            return Lease(until)
        self.until = until
        return self


class NotBegun(JobsError):
    """The lease ran out, or the origin was given up, just before a handler began."""


UNLIMITED = Lease()
"""For who owns what nobody else can take."""
