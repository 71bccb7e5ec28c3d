"""Whether the threads that do the work go on: what ``/livez`` answers by.

Each such thread beats once in a round, or says that it is with somebody else, whose
time is not its own: a handler, or a broker. No server is asked, so no outage makes a
process seem dead: what waits for a server gives up in time, and beats again.
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
"""Seconds that one question adds at most: a process that was frozen is not silent."""


class Pulse:
    """The signs of life of one loop, which are read by any thread."""

    __slots__ = ("_is_alive", "away", "beats", "name")

    def __init__(self, name: str, is_alive: Callable[[], bool]) -> None:
        """Begin without a beat.

        Args:
            name: of the thread, or of several.
            is_alive: whether it is there, or all of them are.
        """
        self.name = name
        self._is_alive = is_alive
        self.beats = 0
        self.away = False
        """Whether it is with somebody else."""

    def beat(self) -> None:
        """It goes on."""
        self.beats += 1

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Meanwhile it is with somebody else, for as long as that takes."""
        self.away = True
        try:
            yield
        finally:
            self.away = False
            self.beats += 1

    def is_alive(self) -> bool:
        """Whether the thread is there."""
        return self._is_alive()


class Liveness:
    """Judges pulses each time that it is asked.

    Args:
        pulses: of all threads that should live now.
        silent: seconds without a beat after which one counts as dead.
    """

    def __init__(
        self, pulses: Callable[[], Iterable[Pulse]], silent: float = SILENT
    ) -> None:
        self._pulses = pulses
        self._silent = silent
        self._lock = threading.Lock()
        self._asked_at = time.monotonic()
        self._known: dict[Pulse, tuple[int, float]] = {}
        """The beats of each that were counted last, and its seconds without one."""

    def find_silent(self) -> list[str]:
        """The names of those that count as dead."""
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
