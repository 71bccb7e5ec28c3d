"""A process may begin jobs only while no other process can count it as dead."""

from __future__ import annotations

import math
import time

from jobs_lib.errors import JobsError

_MARGIN = 0.1
"""The share of ``stale_after`` kept back, for a job that is just being started."""


class Lease:
    """The time in which this process counts as alive; each heartbeat extends it.

    A job begins only while the lease under which it was claimed lasts. A lease that ran
    out is never extended: others may have taken the origins since, so the jobs claimed
    under it must be claimed anew.
    """

    __slots__ = ("until",)

    def __init__(self, until: float = math.inf) -> None:
        self.until = until
        """On the monotonic clock."""

    def is_over(self) -> bool:
        """Whether jobs that were claimed under it may no longer begin."""
        return time.monotonic() >= self.until

    def renew(self, sent_at: float, stale_after: float) -> Lease:
        """Extend the lease after a heartbeat; returns the lease that counts now.

        Args:
            sent_at: when the heartbeat was sent: its answer may come late.
            stale_after: seconds without a heartbeat after which others take over.
        """
        until = sent_at + stale_after * (1 - _MARGIN)
        if self.is_over():
            return Lease(until)
        self.until = until
        return self


class NotBegun(JobsError):
    """The lease ran out, or the origin was released, just before a handler began."""


UNLIMITED = Lease()
"""For an owner whose origins no other process can take."""
