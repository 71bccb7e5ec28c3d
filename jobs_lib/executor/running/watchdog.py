"""Watches an event loop from outside: a blocked loop cannot watch itself."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.telemetry.stacks import read_stack, read_task

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from jobs_lib.executor.lane import ClaimedJob

_TICK = 0.1
_TIMED_TICK = 0.02
_GRACE = 0.5
"""Seconds that a cancelled handler has to end."""
_LAG = 0.5
"""After this many seconds without an answer of the loop an event is emitted, and again
each time the seconds have doubled."""


class Watchdog:
    """Ends attempts whose time is over, and reports a loop that does not answer."""

    def __init__(
        self,
        running: Mapping[ClaimedJob, asyncio.Task[None]],
        *,
        call: Callable[[Callable[[], object]], None],
        cancel: Callable[[ClaimedJob], None],
        give_up: Callable[[asyncio.Task[None], ClaimedJob], bool],
        find_thread: Callable[[], int],
        timed: bool,
    ) -> None:
        """Prepare to watch.

        Args:
            running: the jobs that the loop runs, kept up to date by the loop, and their
                tasks.
            call: lets the loop call a function as soon as it can.
            cancel: cancels a running handler.
            give_up: ends an attempt whose handler goes on; returns False if it has
                ended meanwhile.
            find_thread: returns the id of the loop's thread.
            timed: whether any job may have a time limit.
        """
        self._running = running
        self._call = call
        self._cancel = cancel
        self._give_up = give_up
        self._find_thread = find_thread
        self._tick = _TIMED_TICK if timed else _TICK
        self._asked_at = 0.0
        """When the loop was asked to answer; 0 once it has answered."""
        self._next_lag = _LAG
        self._watching = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="jobs_lib watchdog", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._watching.set()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Start watching: a job is about to run."""
        self._watching.set()

    # The thread

    def _watch(self) -> None:
        while not self._stopping.is_set():
            try:
                self._watching.wait()
                self._watching.clear()
                # Check at least once: the job may not have begun yet.
                while not self._stopping.wait(self._tick) and (
                    self._running or self._asked_at
                ):
                    self._ask()
                    self._watch_limits()
            except BaseException as error:
                telemetry.emit("thread.ended", thread="jobs_lib watchdog", error=error)
                self._watching.set()

    def _ask(self) -> None:
        lag = self._lag()
        if not lag:
            self._asked_at, self._next_lag = time.monotonic(), _LAG
            self._call(self._answer)
        elif lag >= self._next_lag:
            self._next_lag *= 2
            telemetry.emit("loop.blocked", seconds=lag, stack=self._blocked_at())

    def _answer(self) -> None:
        """Note the loop's answer; called by the loop."""
        self._asked_at = 0.0

    def _watch_limits(self) -> None:
        now = time.monotonic()
        for job, task in list(self._running.items()):
            if now < job.deadline:
                continue
            if not job.timed_out:
                job.timed_out = True
                self._cancel(job)
            elif now >= job.deadline + _GRACE:
                stack = read_task(task) if self._lag() < _LAG else self._blocked_at()
                if self._give_up(task, job):
                    telemetry.emit("job.stuck", job=job, stack=stack)

    def _lag(self) -> float:
        """The seconds for which the loop has not answered."""
        asked_at = self._asked_at
        return time.monotonic() - asked_at if asked_at else 0.0

    def _blocked_at(self) -> str:
        return read_stack(self._find_thread())
