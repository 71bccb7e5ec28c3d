"""The loop of async handlers ends, and nobody waits for what it leaves behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jobs_lib.consuming import handler_loop as module
from jobs_lib.consuming.handler_loop import HandlerLoop


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
