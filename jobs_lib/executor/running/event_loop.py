"""An event loop that runs async handlers."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.executor.running.lane_runner import LaneRunner
from jobs_lib.executor.running.ready_queue import ReadyQueue
from jobs_lib.executor.running.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from jobs_lib.executor.lane import ClaimedJob, Item, Lane
    from jobs_lib.executor.limiting.turn import Turn
    from jobs_lib.executor.running.runner import Runner

_YIELD_AFTER = 50
"""Jobs that a task runs before others get the event loop."""


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
        self._starving = starving
        self._close = close
        self._queue: ReadyQueue[asyncio.Task[None]] = ReadyQueue(
            runner, limits, pass_on, lambda: self._watchdog.wake(), is_async=True
        )
        self._idle: deque[asyncio.Future[None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(
            target=self._serve, name="jobs_lib loop", daemon=True
        )
        self._watchdog = Watchdog(
            self._queue.running,
            call=self._call,
            cancel=self.cancel,
            give_up=self._give_up,
            find_thread=lambda: self._thread.ident or 0,
            timed=bool(limits),
        )

    def start(self) -> None:
        """Start the thread.

        Raises:
            OSError: the process may open no more files.
            RuntimeError: it may have no more threads.
        """
        self._started: Future[None] = Future()
        self._thread.start()
        self._started.result()
        self._watchdog.start()

    def stop(self) -> None:
        """Cancel running jobs, and wait for them."""
        self._queue.stop()
        self._watchdog.stop()
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel_all)
            self._thread.join(timeout=5)

    def is_alive(self) -> bool:
        """Whether its thread and the watchdog's thread run."""
        return self._thread.is_alive() and self._watchdog.is_alive()

    @property
    def ran(self) -> int:
        """The number of jobs that were begun."""
        return self._queue.ran

    @property
    def is_starving(self) -> bool:
        """Whether no job waits to be run."""
        return not self._queue.ready

    @property
    def idle(self) -> int:
        """The number of handlers that could run in addition now."""
        return len(self._idle)

    def put(self, items: Sequence[Item | Turn], *, first: bool = False) -> None:
        """Run these in this order: ``first``, or after those that wait."""
        self._queue.put(items, first=first)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._wake_tasks)
        self._watchdog.wake()

    def take_back(self) -> list[Item | Turn]:
        """Take everything back that no task has begun."""
        return self._queue.take_back()

    def cancel(self, job: ClaimedJob) -> None:
        """Cancel a running handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel_one, job)

    def run(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Let the loop run a coroutine, which ``make`` makes there."""
        self._call(lambda: self._keep(make()))

    def _call(self, function: Callable[[], object]) -> None:
        """Let the loop call this as soon as it can."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(function)

    def _give_up(self, task: asyncio.Task[None], job: ClaimedJob) -> bool:
        given_up = self._queue.give_up(task, job)
        if given_up:
            self._call(self._add_task)
        return given_up

    # The loop's thread

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            try:
                loop = runner.get_loop()
            # Whoever waits for the start raises it.
            except BaseException as error:
                self._started.set_exception(error)
                return
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
        self._started.set_result(None)
        while self._tasks:
            # A handler that cancels all tasks cancels this one, too.
            with suppress(asyncio.CancelledError):
                await asyncio.wait(self._tasks)
        await self._close()

    def _add_task(self) -> None:
        self._keep(self._work())

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _wake_tasks(self) -> None:
        for _ in range(min(len(self._queue.ready), len(self._idle))):
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)

    def _cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _cancel_one(self, job: ClaimedJob) -> None:
        if (task := self._queue.running.get(job)) is not None:
            task.cancel()

    async def _work(self) -> None:
        while not self._queue.stopping:
            try:
                await self._work_off()
                return
            except BaseException as error:
                # The cancellation was meant for a job, which has ended.
                if self._queue.stopping:
                    raise
                if not isinstance(error, asyncio.CancelledError):
                    telemetry.emit("thread.ended", thread="jobs_lib loop", error=error)

    async def _work_off(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        lane_runner = LaneRunner(self._queue, task)
        ran = 0
        try:
            while True:
                job = lane_runner.take()
                if job is not None:
                    outcome = await self._runner.run_async(job)
                    # The cancellation was meant for the job, not for the task.
                    while task.cancelling() and not self._queue.stopping:
                        task.uncancel()
                    if not lane_runner.end(job, outcome):
                        return
                    ran += 1
                    if ran % _YIELD_AFTER == 0:
                        await asyncio.sleep(0)
                elif self._queue.stopping:
                    return
                else:
                    await self._wait()
        except BaseException as error:
            lane_runner.fail(error)
            raise

    async def _wait(self) -> None:
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
