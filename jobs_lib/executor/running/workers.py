"""The workers that run jobs: threads for plain handlers, a loop for async ones."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.executor.lane import find_finished, find_head
from jobs_lib.executor.limiting.turn import Turn
from jobs_lib.executor.running.event_loop import AsyncWorkers
from jobs_lib.executor.running.loans import Loans
from jobs_lib.executor.running.runner import Runner
from jobs_lib.executor.running.threads import ThreadWorkers
from jobs_lib.executor.running.throttle import Throttle
from jobs_lib.executor.running.transaction import JobConnections
from jobs_lib.ownership.role import EXECUTE
from jobs_lib.telemetry.liveness import Pulse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from uuid import UUID

    import psycopg

    from jobs_lib.executor.lane import ClaimedJob, Finished, Item, Lane
    from jobs_lib.executor.limiting.gate import JobGate
    from jobs_lib.jobs.limit import Workers
    from jobs_lib.jobs.middleware import RunMiddleware
    from jobs_lib.jobs.type import JobType
    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings


class WorkerPool:
    """Takes jobs and lanes, and runs each on threads or on the event loop."""

    def __init__(
        self,
        database: Database,
        types: Mapping[str, JobType[Any]],
        owner: UUID,
        settings: Settings,
        middleware: Sequence[RunMiddleware],
        starving: Callable[[], None],
        own: Workers | None = None,
        gates: Mapping[str, JobGate] | None = None,
        *,
        role: str = EXECUTE,
        is_timed: bool = False,
    ) -> None:
        self._types = types
        workers, async_workers = settings.workers, settings.async_workers
        if own is not None:
            workers = async_workers = settings.own_workers.get(own.name, own.count)
        # One connection more than workers, so that handlers cannot starve each other.
        self._pool = database.pool("handlers", workers + 1)
        self._async_pool = database.async_pool("handlers", async_workers)
        loans = Loans(
            lambda lost: self._pool.resize(0, workers + 1 + lost),
            lambda lost: self._loop.run(
                lambda: self._async_pool.resize(0, async_workers + lost)
            ),
        )
        connections = JobConnections(
            types,
            database.queries,
            owner,
            self._pool.connection,
            self._borrow_async,
            database.timeout,
            keeps_server=database.prepares,
            role=role,
            loans=loans,
        )
        throttle = Throttle(types, connections)
        self._runner = Runner(
            types, connections, middleware, throttle, gates, is_timed=is_timed
        )
        limits = {n: t.time_limit for n, t in types.items() if t.time_limit is not None}
        self._workers = ThreadWorkers(
            workers, self._runner, limits, starving, self._put_lane
        )
        self._loop = AsyncWorkers(
            async_workers,
            self._runner,
            limits,
            starving,
            self._put_lane,
            self._async_pool.close,
        )
        self._has_loop = any(t.is_async for t in types.values())
        self.size = workers + self._has_loop * async_workers
        """Jobs that may run at once."""
        # Handlers may take any time, so a pulse only checks that the threads exist.
        self.pulses = [
            Pulse("jobs_lib worker", lambda: self._workers.living >= workers)
        ]
        if self._has_loop:
            self.pulses.append(Pulse("jobs_lib loop", self._loop.is_alive))
        for pulse in self.pulses:
            pulse.away = True

    def find_busy(self) -> list[tuple[list[str], int, bool]]:
        """Find types none of whose workers is idle.

        Returns the types, the number of their workers, and whether jobs wait for one.
        """
        sides: list[tuple[bool, ThreadWorkers | AsyncWorkers]]
        sides = [(False, self._workers), (True, self._loop)]
        busy = []
        for is_async, side in sides:
            types = [n for n, t in self._types.items() if t.is_async is is_async]
            if types and not side.idle:
                busy.append((sorted(types), side.count, not side.is_starving))
        return busy

    def start(self) -> None:
        """Start the threads."""
        self._workers.start()
        if self._has_loop:
            self._loop.start()

    def stop(self) -> None:
        """Start no more jobs, and cancel those that run on the loop."""
        self._runner.stopping = True
        self._workers.stop()
        if self._has_loop:
            self._loop.stop()
        self._pool.close(timeout=1)

    @property
    def ran(self) -> int:
        """The number of jobs that were begun."""
        return self._workers.ran + self._loop.ran

    @property
    def is_starving(self) -> bool:
        """Whether no job waits to be run."""
        return self._workers.is_starving and self._loop.is_starving

    @property
    def idle(self) -> int:
        """The number of jobs that could run in addition now; 0 if jobs wait."""
        return self._workers.idle + self._loop.idle if self.is_starving else 0

    def put(self, items: Sequence[Item | Turn], *, first: bool = False) -> None:
        """Run these in this order: ``first``, or after those that wait."""
        # Checked once for each claim, because it costs too much for each job.
        self._runner.is_logged = telemetry.logger.isEnabledFor(logging.DEBUG)
        if not self._has_loop:
            self._workers.put(items, first=first)
            return
        for_loop = [item for item in items if self._is_async(item)]
        for_threads = [item for item in items if not self._is_async(item)]
        if for_loop:
            self._loop.put(for_loop, first=first)
        if for_threads:
            self._workers.put(for_threads, first=first)

    def take_back(self, ended: Finished) -> list[Item]:
        """Take back jobs of one dispatcher that have not begun, oldest first."""
        ours: list[Item] = []
        others: list[Item | Turn] = []
        for item in [*self._workers.take_back(), *self._loop.take_back()]:
            # A turn holds no jobs itself. And another dispatcher, which takes back at
            # the same moment, may have emptied its lanes.
            if not isinstance(item, Turn) and find_finished(item) is ended:
                ours.append(item)
            else:
                others.append(item)
        if others:
            self.put(others[::-1])
        return sorted(ours, key=_find_id)

    def cancel(self, job: ClaimedJob) -> None:
        """Cancel a running handler, if it is async."""
        if self._runner.is_async(job):
            self._loop.cancel(job)

    def _is_async(self, item: Item | Turn) -> bool:
        if isinstance(item, Turn):
            return item.is_async
        head = find_head(item)
        # Any worker ends an empty lane.
        return head is not None and self._runner.is_async(head)

    def _put_lane(self, lane: Lane) -> None:
        self.put([lane])

    @asynccontextmanager
    async def _borrow_async(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        await self._async_pool.open()
        async with self._async_pool.connection() as connection:
            yield connection


def _find_id(item: Item) -> int:
    head = find_head(item)
    return head.id if head is not None else 0
