"""Keeps the history's days in order, in a thread of its own of every service."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.backoff import Retry
from jobs_lib.operating.history import maintain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs_lib.db import Database

_HOUR = 3_600.0
_JITTER = 0.1
# What can be wrong for long, a missing privilege say, is not worth a look each second.
_AFTER_FAILURE = Retry(first=5.0, cap=_HOUR)


class Maintenance:
    """Calls :func:`maintain` at once and then every hour, give or take a tenth.

    Args:
        database: whose history.
        keep: the numbers of days for which finished jobs are kept, of all types.
        interval: seconds between two calls.
    """

    def __init__(
        self, database: Database, keep: Iterable[int], *, interval: float = _HOUR
    ) -> None:
        self._database = database
        self._keep = frozenset(keep)
        self._interval = interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="jobs_lib maintenance", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; waits for the step that it is at."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                maintain(self._database, self._keep)
                failures = 0
                pause = self._interval * random.uniform(1 - _JITTER, 1 + _JITTER)
            except Exception as error:
                failures += 1
                telemetry.emit("loop.failed", loop="maintenance", error=error)
                pause = _AFTER_FAILURE.delay(failures)
            self._stopping.wait(pause)
