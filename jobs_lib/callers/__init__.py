"""What callers hand us to write on, and how a statement runs there.

What is to be done is a generator of steps, so that it is written once; here it is run
on what the caller has, in the transaction that is open there:

    psycopg Connection, AsyncConnection           the driver's own connection
    SQLAlchemy with psycopg, sync and async       the driver's connection behind it
    SQLAlchemy with psycopg2, asyncpg, …          SQLAlchemy's execute
    Django's connection                           the driver's connection behind it

Every parameter is text or bytes, and every result is text: the statements cast them, so
that no driver has to know more types.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from jobs_lib.callers.caller import is_autocommit
from jobs_lib.callers.steps import CopyIn, Fetch, Rows, Statement, Statements, Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from jobs_lib.callers.caller import AsyncCaller, Caller

__all__ = [
    "CopyIn",
    "Fetch",
    "Rows",
    "Statement",
    "Statements",
    "Steps",
    "is_autocommit",
    "perform",
]

R = TypeVar("R")


def perform(
    caller: Caller | AsyncCaller, steps: Steps[R]
) -> R | Coroutine[Any, Any, R]:
    """Run the steps in the caller's transaction; for async ones, when it is awaited.

    Raises:
        NoTransactionError: nothing would hold the caller's change and ours together.
    """
    return _load_driver()(caller, steps)


@cache  # each enqueue comes here, and a repeated import takes ten times as long
def _load_driver() -> Callable[
    [Caller | AsyncCaller, Steps[R]], R | Coroutine[Any, Any, R]
]:
    """What runs steps; only when there are some: psycopg takes 0.15 s to import."""
    from jobs_lib.callers.drivers import run_steps

    return run_steps
