"""The event loop that runs async handlers of records: one for all of a process.

Clients that handlers share, such as a pool of HTTP connections, belong to one loop. The
thread that applies a block waits for each call, so the order of records is kept.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.telemetry.stacks import read_stack, read_task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_NAME = "jobs_lib handlers"
_LAST_SECONDS = 1.0
"""Seconds that cancelled handlers have to end."""
_ANSWER_WITHIN = 0.1
_LOOK_SECONDS = 1.0
"""Seconds between two looks whether the loop is still there."""


class HandlerLoop:
    """An event loop in a thread of its own, while somebody has it open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Keep the loop running until as many calls of :meth:`close`.

        Raises:
            OSError: the process may open no more files.
            RuntimeError: it may have no more threads.
        """
        with self._lock:
            if not self._users:
                self._start()
            # Not before: else the next one would find a loop that is not there.
            self._users += 1

    def _start(self) -> None:
        started: Future[None] = Future()
        thread = threading.Thread(
            target=self._serve, args=(started,), name=_NAME, daemon=True
        )
        thread.start()
        started.result()
        self._thread = thread

    def close(self) -> None:
        """End the loop if nobody else has it open; running handlers are cancelled."""
        with self._lock:
            self._users -= 1
            if self._users or self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._ending.set)
            # A handler that blocks the loop is left behind, as a plain one is.
            self._thread.join(_LAST_SECONDS)

    def begin(self, make: Callable[[], Awaitable[Any]]) -> AsyncCall:
        """Begin to run what ``make`` returns; the loop must be open."""
        assert self._loop is not None
        assert self._thread is not None
        return AsyncCall(self._loop, self._thread.ident or 0, make)

    def _serve(self, started: Future[None]) -> None:
        with asyncio.Runner() as runner:
            try:
                loop = runner.get_loop()
            # Whoever waits for the start raises it.
            except BaseException as error:
                started.set_exception(error)
                return
            main = loop.create_task(self._main(started))
            while not main.done():
                try:
                    loop.run_until_complete(main)
                # Something that a handler left behind has exited or stopped the loop.
                except BaseException as error:
                    telemetry.emit("thread.ended", thread=_NAME, error=error)

    async def _main(self, started: Future[None]) -> None:
        self._ending = ending = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        started.set_result(None)
        while not ending.is_set():
            # A handler that cancels all tasks cancels this one, too.
            with suppress(asyncio.CancelledError):
                await ending.wait()


class AsyncCall:
    """One call of an async handler."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: int,
        make: Callable[[], Awaitable[Any]],
    ) -> None:
        self._loop = loop
        self._thread = thread
        self._make = make
        self._task: asyncio.Task[None] | None = None
        self._ended: Future[Any] = Future()
        # With the caller's context, such as the record's origin.
        loop.call_soon_threadsafe(self._start)

    def wait(self) -> Any:
        """Wait until the handler has ended, and raise what it raised."""
        while True:
            try:
                return self._ended.result(_LOOK_SECONDS)
            except TimeoutError:
                # A call that came as the loop ended is neither run nor cancelled. Its
                # thread has a transaction open.
                is_over = self._loop.is_closed()
                if self._ended.done():
                    return self._ended.result()  # the error is its own
                if is_over:
                    raise asyncio.CancelledError from None

    def cancel(self) -> None:
        """Cancel the handler, which may take its time, or go on."""
        if self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    def find_stack(self) -> str:
        """Find where the handler waits, or what keeps the loop from going on."""
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        if self._task is not None and answered.wait(_ANSWER_WITHIN):
            return read_task(self._task)
        return read_stack(self._thread)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._end)

    async def _run(self) -> None:
        try:
            result = await self._make()
        # SystemExit, too: if a handler raises it, its record fails, not the loop.
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(result)

    def _end(self, task: asyncio.Task[None]) -> None:
        # A task that is cancelled at once does not begin.
        if not self._ended.done():
            self._ended.set_exception(asyncio.CancelledError())


HANDLER_LOOP = HandlerLoop()
"""The one of this process."""
