"""The steps of a publish, written once for plain and async callers.

A publish is a generator. It yields what blocks: a function to call, the outcome of an
event, or a pause. A plain caller waits in its thread. For an async one, functions run
in another thread, and its event loop goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from jobs_lib.callers import Pause
from jobs_lib.streams.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Generator

R = TypeVar("R")
Step: TypeAlias = Callable[[], Any] | Outcome | Pause
Steps: TypeAlias = "Generator[Step, Any, R]"


def run(steps: Steps[R]) -> R:
    """Do the steps in this thread."""
    go: Callable[[], Step] = partial(next, steps)
    while True:
        try:
            step = go()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            answer = _do(step)
        except BaseException as error:
            go = partial(steps.throw, error)
        else:
            go = partial(steps.send, answer)


async def run_async(steps: Steps[R]) -> R:
    """Do the steps without blocking the running event loop."""
    go: Callable[[], Step] = partial(next, steps)
    while True:
        try:
            step = go()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            answer = await _do_async(step)
        except BaseException as error:
            go = partial(steps.throw, error)
        else:
            go = partial(steps.send, answer)


def _do(step: Step) -> Any:
    if isinstance(step, Outcome):
        return step.wait()
    if isinstance(step, Pause):
        return time.sleep(step.seconds)
    return _call(step)


async def _do_async(step: Step) -> Any:
    import asyncio

    if isinstance(step, Outcome):
        return await step.wait_async()
    if isinstance(step, Pause):
        return await asyncio.sleep(step.seconds)
    return await asyncio.to_thread(_call, step)


def _call(step: Callable[[], Any]) -> Any:
    """Call a function of the library or of the application.

    A ``next`` without anything left ends generators, and no future takes its error: a
    task that waits for the thread would wait for ever.

    Raises:
        RuntimeError: the function has raised a StopIteration.
    """
    try:
        return step()
    except StopIteration as error:
        raise RuntimeError("a function of a publish raised StopIteration") from error
