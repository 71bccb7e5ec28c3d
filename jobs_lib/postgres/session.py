"""Connections that do not wait for ever: without an answer in time, they close.

TCP notices a host that is gone. It does not notice a proxy or a server that stays,
acknowledges every byte, and sends nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg.rows import Row

from jobs_lib.errors import JobsError

if TYPE_CHECKING:
    from collections.abc import Generator

T = TypeVar("T")
_NOTHING = 0
"""What psycopg sends to a generator when there is nothing to read or write."""


class Session(psycopg.Connection[Row]):
    """A connection whose statements must be answered within some seconds."""

    answer_within: float | None = None
    """Seconds; None while the handler itself decides how long it waits."""
    server: int | None = None
    """The server that answers, once known; see the query ``read_server``."""
    is_lent: bool = False
    """Whether a handler has it, whose transaction the library commits."""

    def commit(self) -> None:
        """Commit the transaction, unless that is the library's task.

        Raises:
            JobsError: a handler has the connection.
        """
        self._refuse("commit")
        super().commit()

    def rollback(self) -> None:
        """Roll the transaction back, unless that is the library's task.

        Raises:
            JobsError: a handler has the connection.
        """
        self._refuse("rollback")
        super().rollback()

    def _refuse(self, what: str) -> None:
        if self.is_lent:
            raise JobsError(
                f"conn.{what}() in a handler: its transaction also holds the effects "
                "of other records and their offset, and jobs_lib ends it. To undo a "
                "part, wrap it in `with conn.transaction():`, which is a savepoint"
            )

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        """Wait as psycopg does, but not longer than that."""
        return super().wait(_limit(self, gen), *args, **options)


class AsyncSession(psycopg.AsyncConnection[Row]):
    """The same for an event loop."""

    answer_within: float | None = None
    server: int | None = None

    async def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        """Wait as psycopg does, but not longer than that."""
        return await super().wait(_limit(self, gen), *args, **options)


def _limit(
    session: Session[Any] | AsyncSession[Any], gen: Generator[Any, Any, T]
) -> Generator[Any, Any, T]:
    if session.answer_within is None:
        return gen
    return _limited(session, gen, session.answer_within)


def _limited(
    session: Session[Any] | AsyncSession[Any],
    gen: Generator[Any, Any, T],
    seconds: float,
) -> Generator[Any, Any, T]:
    deadline = time.monotonic() + seconds
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if ready == _NOTHING and time.monotonic() > deadline:
                # A late answer must not be mistaken for that of another statement.
                session.pgconn.finish()
                raise psycopg.OperationalError(f"no answer within {seconds:g} s")
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
