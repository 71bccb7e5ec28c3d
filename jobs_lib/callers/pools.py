"""Transactions on pooled connections, for callers with nothing else to commit."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast
from weakref import WeakSet

import psycopg
from psycopg import IsolationLevel
from psycopg.rows import Row
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from jobs_lib.errors import UnavailableError
from jobs_lib.masking import masked_url
from jobs_lib.postgres.database import (
    connection_options,
    settle_isolation,
    settle_isolation_async,
)
from jobs_lib.postgres.session import AsyncSession, Session
from jobs_lib.reasons import POOLER, find_reason, hints_at_pooler
from jobs_lib.settings import require_database_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from types import TracebackType

    from jobs_lib.settings import Settings

    Connection = psycopg.Connection[tuple[Any, ...]]
    AsyncConnection = psycopg.AsyncConnection[tuple[Any, ...]]

_WAIT = 30.0
"""Seconds that a caller waits for a connection."""


class _LoopPool(NamedTuple):
    """The pool of an event loop."""

    pid: int
    pool: AsyncConnectionPool[Any]
    opened: WeakSet[psycopg.AsyncConnection[Any]]
    """Its connections."""


class Pools:
    """An application's pools, one for each process and each event loop."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._failures: deque[str] = deque(maxlen=1)
        """Why the last attempt to connect failed; empty if it did not."""
        self._pool: tuple[int, ConnectionPool[Connection]] | None = None
        self._async_pools: dict[asyncio.AbstractEventLoop, _LoopPool] = {}

    def transaction(self) -> PooledTransaction:
        """Make a transaction that commits at the end of its block."""
        return PooledTransaction(self)

    @contextmanager
    def alone(self) -> Iterator[Connection]:
        """Give a connection in autocommit mode."""
        pool = self.pool()
        try:
            connection = pool.getconn()
        except PoolTimeout:
            raise self.unavailable() from None
        try:
            _take_back(connection)
            # The connection stays in that mode until a transaction uses it.
            if not connection.autocommit:
                connection.autocommit = True
            yield connection
        finally:
            pool.putconn(connection)

    def pool(self) -> ConnectionPool[Connection]:
        """The pool of this process: a fork does not use its parent's."""
        found = self._pool
        if found is None or found[0] != os.getpid():
            with self._lock:
                found = self._pool
                if found is None or found[0] != os.getpid():
                    found = self._pool = (os.getpid(), self._open())
        return found[1]

    async def async_pool(self) -> AsyncConnectionPool[AsyncConnection]:
        """The pool of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._async_pools.get(loop)
        if found is None:
            self._end_unused()
            settings = self._settings()
            opened: WeakSet[psycopg.AsyncConnection[Any]] = WeakSet()
            pool = AsyncConnectionPool(
                require_database_url(settings),
                min_size=0,
                max_size=settings.transactions,
                timeout=_WAIT,
                connection_class=_AsyncPooled,
                kwargs={"opened": opened, **self._options(settings)},
                configure=partial(settle_isolation_async, **_settle(settings)),
                check=_check_async,
                open=False,
            )
            found = self._async_pools[loop] = _LoopPool(os.getpid(), pool, opened)
            await pool.open()
        return found.pool

    def close(self) -> None:
        """Close this process's pool; it opens again when it is used."""
        self._end_unused()
        with self._lock:
            found, self._pool = self._pool, None
        if found is not None and found[0] == os.getpid():
            found[1].close()

    async def aclose(self) -> None:
        """Close the pool of the running event loop."""
        found = self._async_pools.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found.pool.close()

    def _end_unused(self) -> None:
        """Close the connections of event loops that have ended.

        Nobody can use them any more. Code that makes a loop for each call would pile
        them up at the server.
        """
        with self._lock:
            # Of a copy: loops of other threads add their pools meanwhile.
            ended = [loop for loop in [*self._async_pools] if loop.is_closed()]
            unused = [self._async_pools.pop(loop) for loop in ended]
        for pid, _, opened in unused:
            # A fork has copies of its parent's connections, which live on.
            if pid == os.getpid():
                for connection in opened:
                    connection.pgconn.finish()

    def unavailable(self) -> UnavailableError:
        """Make an error with a way out, in place of the pool's own."""
        settings = self._settings()
        if self._failures:
            why = (
                f"{self._failures[-1]}. Is it running, and is JOBS_LIB_DATABASE_URL "
                "right?"
            )
        else:
            why = (
                f"are {settings.transactions} transactions at once enough "
                "(JOBS_LIB_TRANSACTIONS)?"
            )
        away = UnavailableError(
            f"no connection to the database at {masked_url(settings.database_url)} was "
            f"free within {_WAIT:g} s: {why}"
        )
        away.is_passing = True
        return away

    def _open(self) -> ConnectionPool[Connection]:
        settings = self._settings()
        return ConnectionPool(
            require_database_url(settings),
            min_size=0,
            max_size=settings.transactions,
            timeout=_WAIT,
            connection_class=_Pooled,
            kwargs=self._options(settings),
            configure=partial(settle_isolation, **_settle(settings)),
            check=_check,
            open=True,
        )

    def _options(self, settings: Settings) -> dict[str, Any]:
        return {
            "failures": self._failures,
            **connection_options(
                "transaction",
                settings.database_timeout,
                prepares=not settings.pgbouncer,
            ),
        }


def _settle(settings: Settings) -> dict[str, Any]:
    return {"stays": not settings.pgbouncer, "within": settings.database_timeout}


class _Pooled(Session[Row]):
    """Notes why connecting fails: the pool itself only reports a timeout."""

    @classmethod
    def connect(cls, conninfo: str = "", **options: Any) -> Self:
        """Connect; note the reason in ``failures`` if that fails."""
        with _noting(options.pop("failures")):
            return super().connect(conninfo, **options)


class _AsyncPooled(AsyncSession[Row]):
    """Notes why connecting fails, on an event loop."""

    @classmethod
    async def connect(cls, conninfo: str = "", **options: Any) -> Self:
        """Connect, and note it in ``opened``, or the reason in ``failures``."""
        opened = options.pop("opened")
        with _noting(options.pop("failures")):
            connection = await super().connect(conninfo, **options)
        opened.add(connection)
        return connection


@contextmanager
def _noting(failures: deque[str]) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        failures.append(find_reason(error))
        raise
    failures.clear()


class PooledTransaction:
    """Gives a connection in a transaction, for ``with`` or ``async with``.

    The transaction commits at the end of the block, and an error rolls it back.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._given: AbstractContextManager[Connection] | None = None
        self._given_async: AbstractAsyncContextManager[AsyncConnection] | None = None

    def __enter__(self) -> Connection:
        self._given = self._pools.pool().connection()
        try:
            connection = self._given.__enter__()
        except PoolTimeout:
            raise self._pools.unavailable() from None
        _take_back(connection)
        if connection.autocommit:
            connection.autocommit = False
        return connection

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        assert self._given is not None
        _note_pooler(error)
        return self._given.__exit__(kind, error, traceback)

    async def __aenter__(self) -> AsyncConnection:
        self._given_async = (await self._pools.async_pool()).connection()
        try:
            connection = await self._given_async.__aenter__()
        except PoolTimeout:
            raise self._pools.unavailable() from None
        try:
            await _take_back_async(connection)
        except BaseException as error:
            # A cancelled caller leaves no connection behind, either.
            await self._given_async.__aexit__(type(error), error, error.__traceback__)
            raise
        return connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        assert self._given_async is not None
        _note_pooler(error)
        return await self._given_async.__aexit__(kind, error, traceback)


def _note_pooler(error: BaseException | None) -> None:
    """Add the way out to an error that the caller's statement got from a pooler."""
    if isinstance(error, psycopg.Error) and hints_at_pooler(error.sqlstate, str(error)):
        error.add_note(POOLER)


def _take_back(connection: psycopg.Connection[Any]) -> None:
    """Set back what an earlier caller has set for its own use, which the pool keeps."""
    cast("Session", connection).take_back()
    # Nothing is set where it is as it was: each caller comes by here.
    if connection.isolation_level is not IsolationLevel.READ_COMMITTED:
        connection.isolation_level = IsolationLevel.READ_COMMITTED
    if connection.read_only is not None:
        connection.read_only = None
    if connection.deferrable is not None:
        connection.deferrable = None


async def _take_back_async(connection: psycopg.AsyncConnection[Any]) -> None:
    cast("AsyncSession", connection).take_back()
    if connection.isolation_level is not IsolationLevel.READ_COMMITTED:
        await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
    if connection.read_only is not None:
        await connection.set_read_only(None)
    if connection.deferrable is not None:
        await connection.set_deferrable(None)
    if connection.autocommit:
        await connection.set_autocommit(False)


def _check(connection: psycopg.Connection[Any]) -> None:
    if _hung_up(connection):
        ConnectionPool.check_connection(connection)


async def _check_async(connection: psycopg.AsyncConnection[Any]) -> None:
    if _hung_up(connection):
        await AsyncConnectionPool.check_connection(connection)


def _hung_up(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any],
) -> bool:
    """Whether the server sent something on an idle connection: mostly its end."""
    poll = select.poll()
    poll.register(connection.pgconn.socket, select.POLLIN)
    return bool(poll.poll(0))
