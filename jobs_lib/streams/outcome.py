"""What becomes of an event that was sent: its place in Kafka, or an error."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from jobs_lib.streams.event import Place


class Outcome:
    """The place of one event, or its error, as soon as Kafka has said which.

    One thread or one task waits for it. A future of the standard library would do, and
    costs more than the rest of a publish: the thread that it wakes has to wait at once
    for the lock that its setter still holds.
    """

    __slots__ = ("_result", "_under_way", "_wake")

    def __init__(self) -> None:
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self._result: Place | Exception | None = None
        self._wake: Callable[[], None] | None = None
        """Wakes the task that waits."""

    def settle(self, result: Place | Exception) -> None:
        """Say where Kafka has the event, or why nobody knows; once."""
        self._result = result
        self._under_way.release()
        if self._wake is not None:
            self._wake()

    def wait(self) -> Place:
        """Wait in this thread; returns the place, or raises the error."""
        with self._under_way:
            return self._read()

    async def wait_async(self) -> Place:
        """Wait without blocking the running event loop; as :meth:`wait`.

        A task that is cancelled waits no longer, and the event goes on.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        heard = loop.create_future()
        self._wake = partial(_wake, loop, heard)
        # It looks only after it has said how to wake it: nothing can come between.
        if self._under_way.locked():
            await heard
        return self._read()

    def _read(self) -> Place:
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None
        return self._result


def _wake(loop: asyncio.AbstractEventLoop, heard: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_end, heard)
    except RuntimeError:
        # Nobody waits in a loop that is closed.
        if not loop.is_closed():
            raise


def _end(heard: asyncio.Future[None]) -> None:
    if not heard.done():
        heard.set_result(None)
