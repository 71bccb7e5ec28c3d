"""A thread that works in rounds, and goes on after each failure."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.telemetry.liveness import Pulse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib.backoff import Retry


class Loop:
    """Works in rounds in a thread of its own, until it is stopped.

    ``work`` is a generator function: it opens what it needs, and yields after each
    successful round. When it raises, the loop emits ``loop.failed``, waits, longer
    after each failure in a row, and calls ``work`` again. The loop ends when ``work``
    returns, or when it is stopped during a wait.

    Args:
        name: of the loop, in its events and in the name of its thread.
        work: does the rounds; returns soon after ``stopping`` is set.
        stopping: ends the loop; several loops may share one. Defaults to its own.
        retry: how long to wait after how many failures in a row.
        failed: called with each failure before the wait, in the loop's thread.
        ended: called once at the end, in the loop's thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Iterator[None]],
        *,
        stopping: threading.Event | None = None,
        retry: Retry = RECONNECT,
        failed: Callable[[BaseException], None] = lambda error: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.stopping = stopping or threading.Event()
        self._work = work
        self._retry = retry
        self._failed = failed
        self._ended = ended
        self._thread = threading.Thread(
            target=self._run, name=f"jobs_lib {name}", daemon=True
        )
        self.pulse = Pulse(self._thread.name, self._thread.is_alive)
        """Beats after each round."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """End the loop, and wait for its round; for ``timeout`` seconds at most."""
        self.stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        failures = 0
        while not self.stopping.is_set():
            self.pulse.beat()
            try:
                for _ in self._work():
                    failures = 0
                    self.pulse.beat()
                break
            # Catch every error: nobody would notice a thread that had ended.
            except BaseException as error:
                failures += 1
                self._failed(error)
                telemetry.emit("loop.failed", loop=self.name, error=error)
                self.stopping.wait(self._retry.delay(failures))
        self._ended()
