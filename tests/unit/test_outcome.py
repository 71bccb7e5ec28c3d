"""The outcome of an event that was sent, for threads and for tasks that wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jobs_lib import UnavailableError
from jobs_lib.streams.event import Place
from jobs_lib.streams.outcome import Outcome

PLACE = Place(3, 7)


def later(outcome: Outcome, result: Place | Exception) -> threading.Thread:
    """Settle an outcome in another thread."""
    thread = threading.Thread(target=outcome.settle, args=(result,))
    thread.start()
    return thread


def test_a_thread_waits_for_the_place_or_the_error():
    for settled_before in (True, False):
        placed, failed = Outcome(), Outcome()
        if settled_before:
            later(placed, PLACE).join()
            later(failed, UnavailableError("gone")).join()
            threads = []
        else:
            threads = [later(placed, PLACE), later(failed, UnavailableError("gone"))]
        assert placed.wait() == PLACE
        with pytest.raises(UnavailableError, match="gone"):
            failed.wait()
        assert placed.wait() == PLACE
        for thread in threads:
            thread.join()


def test_a_task_waits_and_its_loop_goes_on():
    outcome = Outcome()
    turns = 0

    async def work() -> Place:
        nonlocal turns
        waiting = asyncio.create_task(outcome.wait_async())
        for _ in range(3):
            await asyncio.sleep(0)
            turns += 1
        assert not waiting.done()
        thread = later(outcome, PLACE)
        try:
            return await asyncio.wait_for(waiting, 30)
        finally:
            thread.join()

    assert asyncio.run(work()) == PLACE
    assert turns == 3
    # It is settled already.
    assert asyncio.run(outcome.wait_async()) == PLACE


def test_what_a_task_has_left_is_settled_all_the_same():
    outcome, other = Outcome(), Outcome()

    async def leave() -> None:
        waiting = asyncio.create_task(outcome.wait_async())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        outcome.settle(PLACE)
        # Its loop is closed when the event gets its place.
        task = asyncio.create_task(other.wait_async())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    other.settle(UnavailableError("late"))
    assert outcome.wait() == PLACE
    with pytest.raises(UnavailableError, match="late"):
        other.wait()
