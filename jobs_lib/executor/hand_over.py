"""The hand-over: how a dispatcher begins and stops claiming from origins."""

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

_QUIET_STEP = 0.5
"""Seconds between two looks at the jobs that a stop waits for."""


class Commands:
    """Commands of other threads, which the dispatcher's thread runs between rounds."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Wait for commands.

        Args:
            wake: wakes the dispatcher's thread for a command.
        """
        self._wake = wake
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, command: Callable[[], None]) -> None:
        """Run this before the next round, which starts at once."""
        self._waiting.append(command)
        self._wake()

    def repeat(self, command: Callable[[], None]) -> None:
        """Run this before the next round, whenever that starts."""
        self._waiting.append(command)

    def run(self) -> None:
        """Run the commands given until now."""
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()


class HandOver:
    """Takes and releases origins; any thread may call it.

    The dispatcher's thread changes the claimer, by commands. Steps that must not wait
    for that thread only mark jobs and lanes as dropped.
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
            settler: writes the outcomes of their jobs.
            poller: polls them first.
            stopping: set when the dispatcher must stop.
        """
        self._commands = commands
        self._claimer = claimer
        self._settler = settler
        self._poller = poller
        self._stopping = stopping
        self._leaving: list[threading.Event] = []
        """Set as soon as the released jobs are written."""
        self._quiescing = False
        self._cut_off = False
        """Whether the running jobs' time is over: then nothing waits for them again."""

    def take(self, origins: Mapping[str, int]) -> None:
        """Start to claim from origins at these epochs."""

        def join() -> None:
            self._claimer.take(origins)
            if self._quiescing:
                self._claimer.stop_claiming(origins)
            # Poll first: something may be paused.
            self._poller.poll_soon(0.0)

        self._commands.add(join)

    def quiesce(self, deadline: float) -> Callable[[], list[int]]:
        """Claim nothing more; the returned function waits for running jobs."""
        quiet = threading.Event()
        unfinished: list[int] = []
        self._quiescing = True
        claimer = self._claimer
        # At once: the dispatcher may be waiting for the database.
        claimer.stop_claiming(claimer.cursors.copy())

        def begin() -> None:
            # Jobs that a forced stop interrupts must not lose an attempt.
            claimer.in_flight.released += claimer.stop_claiming(claimer.epochs)
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
            # A dispatcher that cannot reach the database holds up a stop only if jobs
            # run, or their outcomes are to be written.
            while not quiet.wait(_QUIET_STEP) and time.monotonic() < deadline + 1.0:
                flying = claimer.in_flight.jobs.copy().values()
                if not any(job.started for job in flying):
                    return []
            return unfinished

        self._commands.add(begin)
        return wait

    def release(self, origins: frozenset[str], deadline: float) -> Callable[[], None]:
        """Stop claiming from origins; the returned function waits for running jobs.

        It settles those that have ended by then.
        """
        quiet = threading.Event()
        claimer = self._claimer
        # At once: the dispatcher may be waiting for the database.
        claimer.stop_claiming(origins)

        def leave() -> None:
            jobs = claimer.stop_claiming(origins)
            running = any(job.started for job in jobs) and not self._cut_off
            if running and time.monotonic() < deadline and not self._stopping.is_set():
                # Again after the next outcome: it is settled under the epoch we still
                # have.
                self._commands.repeat(leave)
            else:
                claimer.in_flight.released += claimer.release(origins)
                self._leaving.append(quiet)

        def wait() -> None:
            # A dispatcher that cannot reach the database must not hold up a hand-over.
            quiet.wait(max(0.0, deadline - time.monotonic()) + 1.0)

        self._commands.add(leave)
        return wait

    def lose(self, origins: frozenset[str]) -> None:
        """Begin no more jobs of origins that others have taken: a release follows.

        At once: the dispatcher may be waiting for the database.
        """
        jobs = self._claimer.stop_claiming(origins)
        late = {job.id for job in jobs if not job.started}
        flying = self._claimer.in_flight.jobs
        # Jobs that have ended by then were reported before.
        self._commands.add(lambda: self._settler.tell_dropped(late & flying.keys()))

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits until the released jobs are written."""
        return bool(self._leaving)

    def note_written(self) -> None:
        """The released jobs are written: wake the threads that wait for it."""
        for event in self._leaving:
            event.set()
        self._leaving.clear()
