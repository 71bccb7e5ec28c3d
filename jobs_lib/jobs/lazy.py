"""What a handler returns that would still have to be run: nobody does that."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import Any

from jobs_lib.errors import JobsError

_LAZY = (Awaitable, Generator, AsyncGenerator)


def refuse_lazy(left: Any, what: str) -> None:
    """Fail a handler that returns a coroutine or a generator: its work is not done.

    Args:
        left: what it has returned.
        what: names the handler, as in ``the handler of 'charge'``.

    Raises:
        JobsError: it has to be awaited, or looped over.
    """
    if not isinstance(left, _LAZY):
        return
    if inspect.iscoroutine(left):
        left.close()  # or Python warns that it was never awaited
    done = "looped over" if isinstance(left, Generator) else "awaited"
    raise JobsError(
        f"{what} returned a {type(left).__name__}, which nobody has {done}, so its "
        "work is not done: let it do the work before it returns. What has to be "
        "awaited belongs into the `async def` handler of a job"
    )
