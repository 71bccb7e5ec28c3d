"""An event loop that runs async handlers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from jobs_lib.jobs.model import Job, Lane

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from jobs_lib.jobs.claim import Item
    from jobs_lib.jobs.run import Runner

_TICK = 0.02
_YIELD_AFTER = 50


class Loop:
    """Runs jobs on one event loop, in a thread of its own.

    As many tasks as jobs may run at once take lanes in turn: a task for each job would
    cost ten times as much as a quick job.
    """

    def __init__(
        self,
        count: int,
        runner: Runner,
        limits: Mapping[str, float],
        starving: Callable[[], None],
        pass_on: Callable[[Lane], None],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self._count = count
        self._runner = runner
        self._limits = limits
        self._starving = starving
        self._pass_on = pass_on
        self._close = close
        self._ready: deque[Item] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._running: dict[int, tuple[Job, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._thread = threading.Thread(
            target=self._serve, name="jobs_lib loop", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        started = threading.Event()
        self._started = started
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        """Cancel what runs, and wait for it."""
        self._stopping = True
        self._ready.clear()
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel_all)
            self._thread.join(timeout=5)

    @property
    def is_starving(self) -> bool:
        """Whether nothing waits to be run."""
        return not self._ready

    @property
    def idle(self) -> int:
        """Handlers that could run besides those that do."""
        return len(self._idle)

    def put(self, items: Iterable[Item]) -> None:
        """Run these, in this order."""
        self._ready.extend(items)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._wake_tasks)

    def take_back(self) -> list[Item]:
        """What no task has begun."""
        taken: list[Item] = []
        while True:
            try:
                taken.append(self._ready.pop())
            except IndexError:
                return taken

    def cancel(self, job: Job) -> None:
        """Cancel a running handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel_one, job)

    # The loop's thread

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        watcher = asyncio.create_task(self._watch())
        for _ in range(self._count):
            self._add_task()
        self._started.set()
        while self._tasks:
            await asyncio.wait(self._tasks)
        watcher.cancel()
        await self._close()

    def _add_task(self) -> None:
        task = asyncio.create_task(self._work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _wake_tasks(self) -> None:
        for _ in range(min(len(self._ready), len(self._idle))):
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)

    def _cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _cancel_one(self, job: Job) -> None:
        if running := self._running.get(job.id):
            running[1].cancel()

    async def _work(self) -> None:
        ran = 0
        while not self._stopping:
            try:
                item = self._ready.popleft()
            except IndexError:
                self._starving()
                waiting = asyncio.get_running_loop().create_future()
                self._idle.append(waiting)
                await waiting
                continue
            if isinstance(item, Job):
                await self._run(item)
            else:
                await self._run_lane(item)
            ran += 1
            if ran % _YIELD_AFTER == 0:
                await asyncio.sleep(0)

    async def _run(self, job: Job) -> bool:
        job.started = True
        if job.lane.dropped:
            job.started = False
            return False
        if job.cancel_requested:
            return job.lane.ended.add(job, self._runner.cancelled(job))
        task = asyncio.current_task()
        assert task is not None
        limit = self._limits.get(job.type) if self._limits else None
        if limit is not None:
            job.deadline = time.monotonic() + limit
        self._running[job.id] = job, task
        outcome = await self._runner.run_async(job)
        del self._running[job.id]
        # A cancellation was the job's, not the task's.
        while task.cancelling() and not self._stopping:
            task.uncancel()
        return job.lane.ended.add(job, outcome)

    async def _run_lane(self, lane: Lane) -> None:
        jobs = lane.jobs
        while not lane.dropped and not self._stopping:
            try:
                job = jobs.popleft()
            except IndexError:
                break
            if not self._runner.is_async(job):
                jobs.appendleft(job)
                self._pass_on(lane)
                return
            if not await self._run(job):
                lane.failed = True
                break
        lane.ended.add_lane(lane)
        if lane.failed or not self._ready:
            lane.ended.wake()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            for job, task in list(self._running.values()):
                if now >= job.deadline and not job.timed_out:
                    job.timed_out = True
                    task.cancel()
