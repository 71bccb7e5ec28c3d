"""Refuse handlers that return work, such as a coroutine, instead of doing it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import Any

from jobs_lib.errors import JobsError

_LAZY = (Awaitable, Generator, AsyncGenerator)


def refuse_lazy(
    left: Any,
    what: str,
    way_out: str = "To await something, write the job's handler as `async def`",
) -> None:
    """Fail a handler that returns a coroutine or a generator: its work is not done.

    Args:
        left: the returned value.
        what: names the handler, as in ``the handler of 'charge'``.
        way_out: says how something can be awaited.

    Raises:
        JobsError: the value would have to be awaited, or looped over.
    """
    if not isinstance(left, _LAZY):
        return
    if inspect.iscoroutine(left):
        left.close()  # otherwise Python warns that it was never awaited
    done = "looped over" if isinstance(left, Generator) else "awaited"
    raise JobsError(
        f"{what} returned a {type(left).__name__}, which was never {done}, so its "
        f"work is not done: let it do the work before it returns. {way_out}"
    )
