"""The executor, put together: dispatchers that claim and settle, a crew that runs."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from jobs_lib.executor.crew import Crew
from jobs_lib.executor.dispatcher import Dispatcher
from jobs_lib.executor.pace import Pace
from jobs_lib.jobs.claim import Claimer
from jobs_lib.jobs.complete import Completer
from jobs_lib.jobs.lease import UNLIMITED
from jobs_lib.jobs.meter import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from uuid import UUID

    from jobs_lib.db import Database
    from jobs_lib.jobs.lease import Lease
    from jobs_lib.jobs.model import Job
    from jobs_lib.jobs.run import Around
    from jobs_lib.jobs.type import JobType
    from jobs_lib.liveness import Pulse
    from jobs_lib.settings import Settings

_DISPATCHERS = 2
"""While one waits for the database, the other makes sense of what it got from it."""


class Executor:
    """Runs the jobs of the origins it is given; a Holder of the role ``execute``."""

    def __init__(
        self,
        database: Database,
        types: Mapping[str, JobType[Any]],
        owner: UUID,
        installation: UUID,
        settings: Settings,
        around: Sequence[Around] = (),
        lease: Callable[[], Lease] = lambda: UNLIMITED,
        *,
        is_measured: bool = False,
    ) -> None:
        self._crew = Crew(
            database, types, owner, settings, around, self._wake, is_timed=is_measured
        )
        meters = [Meter() if is_measured else None for _ in range(_DISPATCHERS)]
        self.meters = [meter for meter in meters if meter is not None]
        """The figures of its jobs; none where nobody wants them."""
        alone = threading.Lock()
        self._dispatchers = [
            Dispatcher(
                database,
                Claimer(owner, installation, types, first, _DISPATCHERS, alone, lease),
                Completer(owner, types),
                self._crew,
                Pace(self._crew.size // _DISPATCHERS, settings.batch // _DISPATCHERS),
                settings.poll_interval,
                # One listens for all.
                None if first else self._hint,
                self._hears,
                meters[first],
            )
            for first in range(_DISPATCHERS)
        ]

    @property
    def ran(self) -> int:
        """How many jobs it has run, or begun to."""
        return self._crew.ran

    @property
    def running(self) -> list[Job]:
        """The jobs whose handlers run, asked from any thread."""
        return [job for dispatcher in self._dispatchers for job in dispatcher.running]

    @property
    def pulses(self) -> list[Pulse]:
        """The signs of life of its threads."""
        return [*self._crew.pulses, *(one.pulse for one in self._dispatchers)]

    def start(self) -> None:
        """Start the threads; nothing runs until origins are acquired."""
        self._crew.start()
        for dispatcher in self._dispatchers:
            dispatcher.start()

    def stop(self) -> None:
        """Stop the threads. Call after the origins have been released."""
        for dispatcher in self._dispatchers:
            dispatcher.stop()
        self._crew.stop()

    def acquire(self, origins: Mapping[str, int]) -> None:
        """Start to claim from origins at these epochs."""
        for dispatcher, share in self._share(origins):
            dispatcher.acquire({origin: origins[origin] for origin in share})

    def quiesce(self, timeout: float) -> list[int]:
        """Claim nothing more, and wait up to ``timeout`` seconds for what is running.

        Returns the ids of the jobs that still run then: they are released, which burns
        no attempt, and can commit nothing any more.
        """
        deadline = time.monotonic() + timeout
        waits = [dispatcher.quiesce(deadline) for dispatcher in self._dispatchers]
        return [job_id for wait in waits for job_id in wait()]

    def release(self, origins: frozenset[str], timeout: float) -> None:
        """Stop claiming from origins; wait for their running jobs, and settle them."""
        deadline = time.monotonic() + timeout
        waits = [
            dispatcher.release(share, deadline)
            for dispatcher, share in self._share(origins)
        ]
        for wait in waits:
            wait()

    def lose(self, origins: Iterable[str]) -> None:
        """Begin nothing more of these origins, and wait for nothing."""
        for dispatcher, share in self._share(origins):
            dispatcher.lose(share)

    def hurry(self, jobs: Mapping[int, str]) -> None:
        """Run these before all others: ids, with their origins."""
        for dispatcher, share in self._share(jobs.values()):
            dispatcher.hurry({i: o for i, o in jobs.items() if o in share})

    def _hint(self, origin: str) -> None:
        """Pass on what the first has heard; a hint without an origin is for all."""
        for place, dispatcher in enumerate(self._dispatchers):
            if place and (not origin or place == _place(origin)):
                dispatcher.hint(origin)

    def _hears(self) -> bool:
        return self._dispatchers[0].hears

    def _share(self, origins: Iterable[str]) -> list[tuple[Dispatcher, frozenset[str]]]:
        shares: list[set[str]] = [set() for _ in self._dispatchers]
        for origin in origins:
            shares[_place(origin)].add(origin)
        return [
            (dispatcher, frozenset(share))
            for dispatcher, share in zip(self._dispatchers, shares, strict=True)
            if share
        ]

    def _wake(self) -> None:
        for dispatcher in self._dispatchers:
            dispatcher.wake()


def _place(origin: str) -> int:
    return int(origin.rpartition("/")[2]) % _DISPATCHERS
