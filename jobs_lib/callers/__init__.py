"""Run statements on the caller's connection, of any supported kind.

An operation is a generator of steps, so that it is written only once. The steps run on
the caller's connection, in its open transaction:

    psycopg Connection, AsyncConnection           the driver's own connection
    SQLAlchemy with psycopg, sync and async       the driver's connection behind it
    SQLAlchemy with psycopg2, asyncpg, …          SQLAlchemy's execute
    Django's connection                           the driver's connection behind it

All parameters are text or bytes, and all results are text: the statements cast them, so
that no driver needs to know more types.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from jobs_lib.callers.caller import is_autocommit
from jobs_lib.callers.steps import (
    CopyIn,
    Fetch,
    Pause,
    Rows,
    Statement,
    Statements,
    Steps,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from jobs_lib.callers.caller import AsyncCaller, Caller

__all__ = [
    "CopyIn",
    "Fetch",
    "Pause",
    "Rows",
    "Statement",
    "Statements",
    "Steps",
    "is_autocommit",
    "perform",
]

R = TypeVar("R")


def perform(
    caller: Caller | AsyncCaller, steps: Steps[R], *, alone: bool = False
) -> R | Coroutine[Any, Any, R]:
    """Run the steps in the caller's transaction; on async connections, when awaited.

    Args:
        caller: the caller's connection.
        steps: what to run.
        alone: whether they belong to no change of the caller's, and so need no open
            transaction.

    Raises:
        NoTransactionError: the steps would not commit with the caller's change.
    """
    return _load_driver()(caller, steps, alone)


@cache  # each enqueue calls this, and a repeated import takes ten times as long
def _load_driver() -> Callable[
    [Caller | AsyncCaller, Steps[R], bool], R | Coroutine[Any, Any, R]
]:
    """Import what runs steps only when it is needed: psycopg takes 0.15 s to import."""
    from jobs_lib.callers.drivers import run_steps

    return run_steps
