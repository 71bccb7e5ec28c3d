"""Connections that do not wait for ever: without an answer in time, they close.

TCP notices a host that is gone. It does not notice a proxy or a server that stays,
acknowledges every byte, and sends nothing.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psycopg
from psycopg.generators import send
from psycopg.rows import AsyncRowFactory, Row, RowFactory, tuple_row

from jobs_lib.errors import JobsError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

T = TypeVar("T")
_CANCEL_SECONDS = 1.0
"""Seconds to reach the server, and then for the answer that the statement is over."""
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
    cancels: bool = False
    """Whether a statement without an answer is cancelled before the connection is
    closed. One that waits for a lock would stay behind in the server."""
    _own_limit: float | None = None

    def lend(self) -> None:
        """Lend the open transaction to a handler, which decides how long it waits."""
        self.is_lent, self._own_limit = True, self.answer_within
        self.answer_within = None

    def take_back(self) -> None:
        """End a loan: what a handler has set for its own rows is set back."""
        if self.is_lent:
            self.is_lent, self.answer_within = False, self._own_limit
        self.row_factory = cast("RowFactory[Row]", tuple_row)
        self.cursor_factory = psycopg.Cursor
        self.server_cursor_factory = psycopg.ServerCursor

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
            raise _not_yours(what, "with")

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        """Wait as psycopg does, but not longer than that."""
        return super().wait(_limit(self, gen), *args, **options)


def commit_soon(
    connection: psycopg.Connection[Any], pipeline: psycopg.Pipeline
) -> None:
    """Let the server commit what was sent in a pipeline; its answers come later.

    The driver's own method waits for them. Without either, the server would keep the
    transaction, and its locks, open until the pipeline ends.

    Raises:
        psycopg.Error: a statement failed, as far as that is known by now.
    """
    pipeline._enqueue_sync()
    with connection.lock:
        connection.wait(pipeline._communicate_gen())
        # That may leave a part of a large block to the next call.
        connection.wait(send(connection.pgconn))


def take_back(connection: psycopg.Connection[Any]) -> None:
    """Set back what the application's code has set for its own rows.

    A connection that is not the library's own, such as one of a test, is left alone.
    """
    if isinstance(connection, Session):
        connection.take_back()


class AsyncSession(psycopg.AsyncConnection[Row]):
    """The same for an event loop."""

    answer_within: float | None = None
    server: int | None = None

    def take_back(self) -> None:
        """End a loan: what a handler has set for its own rows is set back."""
        self.row_factory = cast("AsyncRowFactory[Row]", tuple_row)
        self.cursor_factory = psycopg.AsyncCursor
        self.server_cursor_factory = psycopg.AsyncServerCursor

    async def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        """Wait as psycopg does, but not longer than that."""
        return await super().wait(_limit(self, gen), *args, **options)


class LentSession(AsyncSession[Any]):
    """The open transaction of a connection, lent to one call of an async handler.

    It speaks through the connection itself, so that what the handler writes and the
    offset are one transaction. The thread of the connection waits meanwhile.
    """

    def __init__(self, session: psycopg.Connection[Any]) -> None:
        """Borrow a connection, until :meth:`end`.

        Args:
            session: with a transaction open.
        """
        self._listeners = session.pgconn.notice_handler, session.pgconn.notify_handler
        super().__init__(session.pgconn)
        # The server's session is one: what it was told, and what it has prepared.
        self._adapters = session.adapters
        self._prepared = session._prepared
        self._is_over = False
        self._waiting: set[asyncio.Task[Any] | None] = set()
        self._none_waits = asyncio.Event()

    async def end(self) -> None:
        """Give the connection back: what the handler has left behind is refused.

        A statement that still runs is cancelled, and waited for: the connection must
        be free.
        """
        self._is_over = True
        for task in self._waiting:
            if task is not None:
                task.cancel()
        while self._waiting:
            self._none_waits.clear()
            # Whoever cancels the handler must not cancel this.
            with suppress(asyncio.CancelledError):
                await self._none_waits.wait()
        self.pgconn.notice_handler, self.pgconn.notify_handler = self._listeners

    async def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        """Wait as psycopg does.

        Raises:
            JobsError: the handler has ended.
        """
        if self._is_over:
            raise JobsError(
                "conn is used after its handler has ended: its transaction holds other "
                "records now. Let the handler await all that uses conn"
            )
        task = asyncio.current_task()
        self._waiting.add(task)
        try:
            return await super().wait(gen, *args, **options)
        finally:
            self._waiting.discard(task)
            self._none_waits.set()

    async def commit(self) -> None:
        """Refuse: that is the library's task.

        Raises:
            JobsError: always.
        """
        raise _not_yours("commit", "async with")

    async def rollback(self) -> None:
        """Refuse, likewise.

        Raises:
            JobsError: always.
        """
        raise _not_yours("rollback", "async with")

    def __del__(self, *_: Any) -> None:
        """Warn of nothing: the connection goes on."""


@contextmanager
def answered_within(
    session: Session[Any] | AsyncSession[Any], seconds: float | None
) -> Iterator[None]:
    """Let a statement inside fail that is not answered in time.

    Args:
        session: runs the statement.
        seconds: None to wait for ever.
    """
    before, session.answer_within = session.answer_within, seconds
    try:
        yield
    finally:
        session.answer_within = before


def _not_yours(what: str, enter: str) -> JobsError:
    return JobsError(
        f"conn.{what}() in a handler: its transaction also holds the effects of other "
        "records and their offset, and jobs_lib ends it. To undo a part, wrap it in "
        f"`{enter} conn.transaction():`, which is a savepoint"
    )


def _limit(
    session: Session[Any] | AsyncSession[Any], gen: Generator[Any, Any, T]
) -> Generator[Any, Any, T]:
    if session.answer_within is None:
        return gen
    return _limited(session, gen, session.answer_within)


def _cancel(session: Session[Any] | AsyncSession[Any]) -> bool:
    """Cancel the statement that runs; returns whether the server was reached."""
    try:
        cast("Session[Any]", session).cancel_safe(timeout=_CANCEL_SECONDS)
    except psycopg.Error:
        return False
    return True


def _limited(
    session: Session[Any] | AsyncSession[Any],
    gen: Generator[Any, Any, T],
    seconds: float,
) -> Generator[Any, Any, T]:
    deadline = time.monotonic() + seconds
    may_cancel = isinstance(session, Session) and session.cancels
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if ready == _NOTHING and time.monotonic() > deadline:
                if may_cancel and _cancel(session):
                    may_cancel = False
                    deadline = time.monotonic() + _CANCEL_SECONDS
                    continue
                # A late answer must not be mistaken for that of another statement.
                session.pgconn.finish()
                raise psycopg.OperationalError(f"no answer within {seconds:g} s")
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
