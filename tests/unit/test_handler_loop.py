"""The loop of async handlers starts or says why, and nobody waits when it ends."""

from __future__ import annotations

import asyncio
import errno
import threading
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from jobs_lib.consuming import handler_loop as module
from jobs_lib.consuming.handler_loop import HandlerLoop
from jobs_lib.executor.running.event_loop import AsyncWorkers

NO_THREAD = RuntimeError("can't start new thread")
NO_FILE = OSError(errno.EMFILE, "too many open files")


def fail(error: BaseException) -> Any:
    """A function that raises it."""

    def raise_it(*_: object) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("method", "error"),
    [("threading.Thread.start", NO_THREAD), ("asyncio.Runner.get_loop", NO_FILE)],
    ids=["no thread", "no file"],
)
def test_a_loop_that_cannot_start_says_why_and_starts_the_next_time(method, error):
    loop = HandlerLoop()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(method, fail(error))
        with pytest.raises(type(error)):
            loop.open()
    loop.open()
    try:
        assert loop.begin(lambda: asyncio.sleep(0, 7)).wait() == 7
    finally:
        loop.close()


def test_the_loop_of_async_jobs_says_why_it_cannot_start(monkeypatch):
    workers = AsyncWorkers(1, Mock(), {}, Mock(), Mock(), AsyncMock())
    monkeypatch.setattr("asyncio.Runner.get_loop", fail(NO_FILE))
    with pytest.raises(OSError, match="too many open files"):
        workers.start()


def test_a_call_that_comes_as_the_loop_ends_is_over_with_it(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.05)
    loop, late, begun = HandlerLoop(), [], threading.Event()

    async def go_on() -> None:
        await asyncio.Event().wait()

    async def begin_another() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            # As a worker's thread does it that the stop has left behind.
            late.append(loop.begin(go_on))

    loop.open()
    call = loop.begin(begin_another)
    assert begun.wait(10)
    loop.close()
    with pytest.raises(asyncio.CancelledError):
        call.wait()
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(asyncio.CancelledError):
            late[0].wait()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert ended.wait(5)


def test_a_handlers_own_timeout_is_its_error(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    loop = HandlerLoop()

    async def fail() -> None:
        await asyncio.sleep(0.05)
        raise TimeoutError("its own")

    loop.open()
    try:
        with pytest.raises(TimeoutError, match="its own"):
            loop.begin(fail).wait()
    finally:
        loop.close()
