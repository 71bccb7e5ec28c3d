"""Time limits of handlers: what waits too long is cancelled, or at least reported.

A statement that waits in the database can be cancelled, and so can an async handler.
Python cannot end a plain handler that waits elsewhere. So it is reported for as long as
it runs, with its stack, and its record fails once it has ended.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_TICK = 0.02
_AGAIN = 0.5
"""Seconds between two attempts to cancel: between two statements nothing waits in the
database, and a handler may catch the error and go on."""
_IDLE = 5.0
"""Seconds without a call after which the thread ends; the next call starts another."""


class TimedCall:
    """A running call that has a limit."""

    def __init__(
        self,
        what: str,
        place: Mapping[str, object],
        seconds: float,
        cancel: Callable[[], None],
        find_stack: Callable[[], str],
    ) -> None:
        """Note when it began.

        Args:
            what: names it in the error.
            place: names it in the event.
            seconds: the limit.
            cancel: cancels what can be cancelled; called again and again.
            find_stack: finds where the handler is.
        """
        self._what = what
        self._place = place
        self._seconds = seconds
        self._cancel = cancel
        self._find_stack = find_stack
        self._began_at = time.monotonic()
        self._due_at = self._began_at + seconds
        self._told_at = self._due_at + _AGAIN
        self._lock = threading.Lock()
        self._is_over = False

    def end(self) -> bool:
        """End the call; returns whether it took too long.

        A cancellation that is under way has reached the server then: it cannot cancel
        what the connection does next.
        """
        with self._lock:
            self._is_over = True
        return time.monotonic() >= self._began_at + self._seconds

    def check(self) -> None:
        """Cancel and report the call if it takes too long."""
        now = time.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + _AGAIN
        with self._lock:
            if self._is_over:
                return
            # The server may not answer: the next attempt is soon.
            with suppress(Exception):
                self._cancel()
            if now < self._told_at:
                return
            seconds = now - self._began_at
            # Twice as long, and so on: few lines however long it takes.
            self._told_at = now + seconds
            stack = self._find_stack()
        telemetry.emit(
            "record.stuck",
            **self._place,
            seconds=round(seconds, 1),
            limit=self._seconds,
            stack=stack,
        )

    def explain(self) -> RecordError:
        """Make the error for a call that took too long."""
        return RecordError(
            f"{self._what} took longer than its timeout={self._seconds:g} s, so it is "
            "undone: raise the limit, or enqueue a job for what takes long"
        )


class TimeLimits:
    """Watches calls that have a limit, in a thread that lives while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[TimedCall] = set()
        self._is_watched = False

    @contextmanager
    def watch(self, call: TimedCall) -> Iterator[None]:
        """Watch a call that runs inside the block.

        Raises:
            RecordError: it took too long, even if it ended well.
        """
        self._add(call)
        try:
            yield
        except BaseException as error:
            if self._remove(call):
                late = TimeoutError()
                late.__cause__ = error
                raise call.explain() from late
            raise
        if self._remove(call):
            # Its cause says that the record is not at fault: what the handler asked
            # was slow, or another handler held the loop up.
            raise call.explain() from TimeoutError()

    def _add(self, call: TimedCall) -> None:
        with self._lock:
            if not self._is_watched:
                # It may fail, where the process may have no more threads: the next
                # call tries again.
                threading.Thread(
                    target=self._watch, name="jobs_lib time limits", daemon=True
                ).start()
                self._is_watched = True
            self._running.add(call)

    def _remove(self, call: TimedCall) -> bool:
        with self._lock:
            self._running.discard(call)
        return call.end()

    def _watch(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(_TICK)
            now = time.monotonic()
            with self._lock:
                running = list(self._running)
                if running:
                    idle_since = now
                elif now > idle_since + _IDLE:
                    self._is_watched = False
                    return
            for call in running:
                try:
                    call.check()
                except BaseException as error:
                    telemetry.emit(
                        "thread.ended", thread="jobs_lib time limits", error=error
                    )


TIME_LIMITS = TimeLimits()
"""Those of this process."""
