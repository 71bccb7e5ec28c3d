"""The library's own work for a running job, which its time limit does not count."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs_lib.executor.lane import ClaimedJob


class OwnTime:
    """Stops the clock of a job's time limit, for the length of a ``with`` block.

    The limit is the handler's. The library's own statements have one themselves, and if
    the database is silent for that long, the job pays no attempt.
    """

    __slots__ = ("_began", "_deadline", "_job")

    def __init__(self, job: ClaimedJob) -> None:
        """Prepare; blocks of one job may be nested."""
        self._job = job

    def __enter__(self) -> None:
        """Let no watcher end the job."""
        self._deadline = self._job.deadline
        if self._deadline < math.inf:
            self._began = time.monotonic()
            self._job.deadline = math.inf

    def __exit__(self, *_: object) -> None:
        """Go on, with as many seconds left as there were."""
        if self._deadline < math.inf:
            self._job.deadline = self._deadline + time.monotonic() - self._began
