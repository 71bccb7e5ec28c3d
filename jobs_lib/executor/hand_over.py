"""Origins come and go: how a dispatcher begins and ends to claim from them."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs_lib.executor.claiming.claimer import Claimer
    from jobs_lib.executor.claiming.polling import Poller
    from jobs_lib.executor.settling.settler import Settler


class Commands:
    """What other threads ask of a dispatcher; its own thread does it between rounds."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Wait for commands.

        Args:
            wake: tells the dispatcher's thread that there is one.
        """
        self._wake = wake
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, command: Callable[[], None]) -> None:
        """Do this before the next round, which comes at once."""
        self._waiting.append(command)
        self._wake()

    def repeat(self, command: Callable[[], None]) -> None:
        """Do this before the next round, whenever that comes."""
        self._waiting.append(command)

    def run(self) -> None:
        """Do what was asked until now."""
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()


class HandOver:
    """Takes origins, and gives them back; asked by any thread.

    What changes the claimer is done by the dispatcher's thread, as a command. What must
    not wait for that thread only marks jobs and lanes as dropped.
    """

    def __init__(
        self,
        commands: Commands,
        claimer: Claimer,
        settler: Settler,
        poller: Poller,
        stopping: threading.Event,
    ) -> None:
        """Own nothing.

        Args:
            commands: of the dispatcher.
            claimer: claims from the origins.
            settler: writes what has ended of them.
            poller: looks at them first.
            stopping: set once the dispatcher is to stop.
        """
        self._commands = commands
        self._claimer = claimer
        self._settler = settler
        self._poller = poller
        self._stopping = stopping
        self._leaving: list[threading.Event] = []
        """Told as soon as what was given back is written."""
        self._quiescing = False
        self._cut_off = False
        """Whether the time of what runs is over: nobody waits for it once more."""

    def take(self, origins: Mapping[str, int]) -> None:
        """Start to claim from origins at these epochs."""

        def join() -> None:
            self._claimer.take(origins)
            if self._quiescing:
                self._claimer.stop_claiming(origins)
            # Look first: something may be paused.
            self._poller.poll_soon(0.0)

        self._commands.add(join)

    def quiesce(self, deadline: float) -> Callable[[], list[int]]:
        """Claim nothing more; the function returned waits for what is running."""
        quiet = threading.Event()
        unfinished: list[int] = []
        self._quiescing = True
        claimer = self._claimer

        def begin() -> None:
            # Whoever stops this process by force must not burn what it interrupts.
            claimer.in_flight.given_back += claimer.stop_claiming(claimer.epochs)
            leave()

        def leave() -> None:
            jobs = claimer.stop_claiming(claimer.epochs)
            unfinished[:] = [job.id for job in jobs if job.started]
            if unfinished and time.monotonic() < deadline:
                self._commands.repeat(leave)
            else:
                self._cut_off = bool(unfinished)
                quiet.set()

        def wait() -> list[int]:
            quiet.wait(max(0.0, deadline - time.monotonic()) + 1.0)
            return unfinished

        self._commands.add(begin)
        return wait

    def release(self, origins: frozenset[str], deadline: float) -> Callable[[], None]:
        """Stop claiming from origins; the function returned waits for what is running.

        What of them has ended by then is settled.
        """
        quiet = threading.Event()
        claimer = self._claimer
        # At once: the dispatcher may be waiting for the database.
        claimer.stop_claiming(origins)

        def leave() -> None:
            jobs = claimer.stop_claiming(origins)
            running = any(job.started for job in jobs) and not self._cut_off
            if running and time.monotonic() < deadline and not self._stopping.is_set():
                # Again after the next outcome: settled under the epoch we still have.
                self._commands.repeat(leave)
            else:
                claimer.in_flight.given_back += claimer.release(origins)
                self._leaving.append(quiet)

        def wait() -> None:
            # A dispatcher that cannot reach the database must not hold up a hand-over.
            quiet.wait(max(0.0, deadline - time.monotonic()) + 1.0)

        self._commands.add(leave)
        return wait

    def lose(self, origins: frozenset[str]) -> None:
        """Begin nothing more of origins that others have taken: a release follows.

        At once: the dispatcher may be waiting for the database.
        """
        jobs = self._claimer.stop_claiming(origins)
        late = {job.id for job in jobs if not job.started}
        flying = self._claimer.in_flight.jobs
        # Those that have landed by then were told before.
        self._commands.add(lambda: self._settler.tell_dropped(late & flying.keys()))

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits until what was given back is written."""
        return bool(self._leaving)

    def note_written(self) -> None:
        """What was given back is written: tell those who wait for it."""
        for event in self._leaving:
            event.set()
        self._leaving.clear()
