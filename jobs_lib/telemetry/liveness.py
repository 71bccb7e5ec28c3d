"""Whether the working threads go on: the basis of the answer of ``/livez``.

Each such thread beats once in a round, or says that it waits for other code, such as a
handler or a broker, whose time it cannot limit. No server is asked, so no outage makes
a process seem dead: a thread that waits for a server gives up in time, and beats again.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jobs_lib import telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SILENT = 120.0
"""Seconds without a beat after which a thread counts as dead: longer than any wait for
a server, by the settings that come with the library."""
_LONGEST_STEP = 15.0
"""Seconds that one check adds at most: a process that was frozen is not silent."""


class Pulse:
    """The signs of life of one loop; any thread may read them."""

    __slots__ = ("_is_alive", "away", "beats", "name")

    def __init__(self, name: str, is_alive: Callable[[], bool]) -> None:
        """Begin without a beat.

        Args:
            name: of the thread, or of several.
            is_alive: whether the thread, or each of them, is alive.
        """
        self.name = name
        self._is_alive = is_alive
        self.beats = 0
        self.away = False
        """Whether it waits for other code."""

    def beat(self) -> None:
        """Beat: the loop goes on."""
        self.beats += 1

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, the loop waits for other code, as long as that takes."""
        self.away = True
        try:
            yield
        finally:
            self.away = False
            self.beats += 1

    def is_alive(self) -> bool:
        """Whether the thread is alive."""
        return self._is_alive()


class Liveness:
    """Judges pulses each time that it is called.

    Args:
        pulses: of all threads that must be alive now.
        silent: seconds without a beat after which one counts as dead.
    """

    def __init__(self, pulses: Callable[[], Iterable[Pulse]], silent: float) -> None:
        self._pulses = pulses
        self._silent = silent
        self._lock = threading.Lock()
        self._asked_at = time.monotonic()
        self._known: dict[Pulse, tuple[int, float]] = {}
        """For each thread, its last count of beats, and its seconds without one."""

    def find_silent(self) -> list[str]:
        """The names of the threads that count as dead."""
        with self._lock:
            now = time.monotonic()
            passed, self._asked_at = min(now - self._asked_at, _LONGEST_STEP), now
            before, self._known = self._known, {}
            for pulse in self._pulses():
                beats, quiet = before.get(pulse, (-1, 0.0))
                alive = pulse.is_alive()
                if alive and (pulse.away or pulse.beats != beats):
                    quiet = 0.0
                else:
                    quiet += passed
                    if quiet - passed < self._silent <= quiet:
                        telemetry.emit(
                            "thread.silent", thread=pulse.name, seconds=quiet
                        )
                self._known[pulse] = pulse.beats, quiet
            return [
                pulse.name
                for pulse, (_, quiet) in self._known.items()
                if quiet >= self._silent
            ]
