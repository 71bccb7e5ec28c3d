"""An event loop that runs async handlers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.executor.lane import ClaimedJob, Lane
from jobs_lib.executor.limiting.turn import Turn
from jobs_lib.executor.running.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from jobs_lib.executor.lane import Item
    from jobs_lib.executor.running.runner import Runner

_YIELD_AFTER = 50


class AsyncWorkers:
    """Runs jobs on one event loop, in a thread of its own.

    There is a fixed task for each job that may run at once, and the tasks take lanes in
    turn: a new task for each job would cost ten times as much as a quick job.
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
        self.count = count
        self._runner = runner
        self._limits = limits
        self._starving = starving
        self._pass_on = pass_on
        self._close = close
        self._ready: deque[Item | Turn] = deque()
        self._turns: dict[asyncio.Task[None], Turn] = {}
        self._idle: deque[asyncio.Future[None]] = deque()
        self._running: dict[asyncio.Task[None], ClaimedJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ran = 0
        """The number of jobs that were begun."""
        self._stopping = False
        self._thread = threading.Thread(
            target=self._serve, name="jobs_lib loop", daemon=True
        )
        self._watchdog = Watchdog(
            self._running,
            call=self._call,
            cancel=self.cancel,
            give_up=self._give_up,
            find_thread=lambda: self._thread.ident or 0,
            timed=bool(limits),
        )

    def start(self) -> None:
        """Start the thread."""
        started = threading.Event()
        self._started = started
        self._thread.start()
        started.wait()
        self._watchdog.start()

    def stop(self) -> None:
        """Cancel running jobs, and wait for them."""
        self._stopping = True
        self._ready.clear()
        self._watchdog.stop()
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel_all)
            self._thread.join(timeout=5)

    def is_alive(self) -> bool:
        """Whether its thread and the watchdog's thread run."""
        return self._thread.is_alive() and self._watchdog.is_alive()

    @property
    def is_starving(self) -> bool:
        """Whether no job waits to be run."""
        return not self._ready

    @property
    def idle(self) -> int:
        """The number of handlers that could run in addition now."""
        return len(self._idle)

    def put(self, items: Sequence[Item | Turn], *, first: bool = False) -> None:
        """Run these in this order: ``first``, or after those that wait."""
        if first:
            self._ready.extendleft(reversed(items))
        else:
            self._ready.extend(items)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._wake_tasks)
        self._watchdog.wake()

    def take_back(self) -> list[Item | Turn]:
        """Take everything back that no task has begun."""
        taken: list[Item | Turn] = []
        while True:
            try:
                taken.append(self._ready.pop())
            except IndexError:
                return taken

    def cancel(self, job: ClaimedJob) -> None:
        """Cancel a running handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel_one, job)

    def _call(self, function: Callable[[], object]) -> None:
        """Let the loop call this as soon as it can."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(function)

    def _give_up(self, task: asyncio.Task[None], job: ClaimedJob) -> bool:
        """End an attempt whose handler goes on; False if it has ended meanwhile.

        The handler cannot be stopped. Its work can no longer commit, because the
        attempt is over in the database; another task takes its place.
        """
        if self._running.pop(task, None) is None:
            return False
        job.lane.finished.add(job, self._runner.time_out(job))
        if turn := self._turns.pop(task, None):
            turn.abort()
        if job.group is not None:
            job.lane.failed = True
            job.lane.finished.add_lane(job.lane)
            job.lane.finished.wake()
        self._call(self._add_task)
        return True

    # The loop's thread

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            main = loop.create_task(self._main())
            while not main.done():
                try:
                    loop.run_until_complete(main)
                # Something that a handler left behind has exited or stopped the loop.
                # All tasks are still there, and go on.
                except BaseException as error:
                    telemetry.emit("thread.ended", thread="jobs_lib loop", error=error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        for _ in range(self.count):
            self._add_task()
        self._started.set()
        while self._tasks:
            # A handler that cancels all tasks cancels this one, too.
            with suppress(asyncio.CancelledError):
                await asyncio.wait(self._tasks)
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

    def _cancel_one(self, job: ClaimedJob) -> None:
        for task, running in self._running.items():
            if running is job:
                task.cancel()

    async def _work(self) -> None:
        while not self._stopping:
            try:
                await self._work_off()
                return
            except BaseException as error:
                # The cancellation was meant for a job, which has ended.
                if self._stopping:
                    raise
                if not isinstance(error, asyncio.CancelledError):
                    telemetry.emit("thread.ended", thread="jobs_lib loop", error=error)

    async def _work_off(self) -> None:
        ran = 0
        while not self._stopping:
            try:
                item = self._ready.popleft()
            except IndexError:
                self._starving()
                waiting = asyncio.get_running_loop().create_future()
                self._idle.append(waiting)
                try:
                    await waiting
                except BaseException:
                    # A handler has cancelled all tasks: nothing must wake this one.
                    with suppress(ValueError):
                        self._idle.remove(waiting)
                    raise
                continue
            if isinstance(item, Turn):
                going = await self._run_turn(item)
            else:
                going = await self._run_item(item)
            if going is None:
                return  # another task has taken this one's place
            ran += 1
            if ran % _YIELD_AFTER == 0:
                await asyncio.sleep(0)

    async def _run_item(self, item: Item) -> bool | None:
        if isinstance(item, ClaimedJob):
            return await self._run(item)
        return await self._run_lane(item)

    async def _run_turn(self, turn: Turn) -> bool | None:
        """Run the jobs that wait behind a limit, one after the other."""
        task = asyncio.current_task()
        assert task is not None
        self._turns[task] = turn
        try:
            while not self._stopping:
                item = turn.take()
                if item is None:
                    break
                if await self._run_item(item) is None:
                    return None
                if turn.is_long():
                    self._ready.append(turn)
                    break
        except BaseException:
            if self._turns.pop(task, None):
                turn.abort()
            raise
        self._turns.pop(task, None)
        return True

    async def _run(self, job: ClaimedJob) -> bool | None:
        """Run a job; returns whether its group may go on, None if it was given up."""
        lane = job.lane
        try:
            return await self._run_one(job)
        except BaseException as error:
            # If its outcome is written already, this one changes nothing.
            if task := asyncio.current_task():
                self._running.pop(task, None)
            if not job.timed_out:
                lane.finished.add(job, self._runner.fail(job, error))
            raise

    async def _run_one(self, job: ClaimedJob) -> bool | None:
        job.started, job.began = True, time.monotonic()
        self.ran += 1
        if job.lane.is_over():
            return job.lane.finished.drop(job)
        if job.cancel_requested:
            return job.lane.finished.add(job, self._runner.cancelled(job))
        task = asyncio.current_task()
        assert task is not None
        limit = self._limits.get(job.type) if self._limits else None
        if limit is not None:
            job.deadline = time.monotonic() + limit
            self._watchdog.wake()
        self._running[task] = job
        outcome = await self._runner.run_async(job)
        if self._running.pop(task, None) is None:
            return None
        # The cancellation was meant for the job, not for the task.
        while task.cancelling() and not self._stopping:
            task.uncancel()
        return job.lane.finished.add(job, outcome)

    async def _run_lane(self, lane: Lane) -> bool | None:
        try:
            return await self._run_through(lane)
        except BaseException:
            lane.failed = True
            lane.finished.add_lane(lane)
            lane.finished.wake()
            raise

    async def _run_through(self, lane: Lane) -> bool | None:
        jobs = lane.jobs
        while not lane.dropped and not self._stopping:
            try:
                job = jobs.popleft()
            except IndexError:
                break
            if not self._runner.is_async(job):
                jobs.appendleft(job)
                self._pass_on(lane)
                return True
            going = await self._run(job)
            if going is None:
                return None
            if not going:
                lane.failed = True
                break
        lane.finished.add_lane(lane)
        if lane.failed or not self._ready:
            lane.finished.wake()
        return True
