"""Run steps on the caller's connection, in its open transaction."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from jobs_lib.callers import libpq, unsuited
from jobs_lib.callers.caller import is_autocommit
from jobs_lib.callers.steps import CopyIn, Fetch, Pause
from jobs_lib.errors import NoTransactionError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from sqlalchemy import Connection as SQLAlchemyConnection
    from sqlalchemy import CursorResult

    from jobs_lib.callers.caller import (
        AsyncCaller,
        Autocommit,
        Caller,
        DjangoConnection,
    )
    from jobs_lib.callers.steps import Rows, Steps

R = TypeVar("R")


def run_steps(
    caller: Caller | AsyncCaller, steps: Steps[R], alone: bool = False
) -> R | Coroutine[Any, Any, R]:
    """Run the steps in the caller's transaction; on async connections, when awaited.

    Args:
        caller: the caller's connection.
        steps: what to run.
        alone: whether they need no open transaction.

    Raises:
        NoTransactionError: the steps would not commit with the caller's change.
    """
    if isinstance(caller, psycopg.Connection):
        _check(caller, alone)
        return _drive(lambda step: _run_psycopg(caller, step), steps)
    if is_autocommit(caller):
        # Each step borrows a connection: one that pauses keeps none from others.
        return _drive(lambda step: _run_alone(caller, step), steps)
    if is_async(caller):
        return _perform_async(caller, steps, alone)
    if is_django(caller):
        return _perform_django(caller, steps, alone)
    connection = _unwrap(caller, alone)
    if isinstance(connection, psycopg.Connection):
        return run_steps(connection, steps, alone)
    return _drive(lambda step: _run_sqlalchemy(connection, step), steps)


def driver_connection(caller: Caller | AsyncCaller) -> psycopg.Connection[Any]:
    """Return the caller's psycopg connection.

    Raises:
        NoTransactionError: the caller uses another driver, or an async connection.
    """
    if is_django(caller):
        caller = cast("Any", caller).connection
    elif not isinstance(caller, psycopg.Connection) and not is_async(caller):
        caller = _unwrap(caller, alone=False)
    if not isinstance(caller, psycopg.Connection):
        raise NoTransactionError(
            "this needs a synchronous connection of psycopg, or SQLAlchemy with psycopg"
        )
    return caller


def is_async(caller: object) -> TypeGuard[AsyncCaller]:
    """Whether the caller's connection is asynchronous."""
    caller = _registered(caller)
    return isinstance(caller, psycopg.AsyncConnection) or hasattr(caller, "run_sync")


def is_django(caller: object) -> TypeGuard[DjangoConnection]:
    """Whether it is Django's; found by duck typing, to save others its import."""
    return hasattr(caller, "in_atomic_block")


def _perform_django(
    connection: Any, steps: Steps[R], alone: bool
) -> R | Coroutine[Any, Any, R]:
    """Run on the driver's connection behind Django's: psycopg 3, if it is installed."""
    if connection.vendor != "postgresql":
        unsuited.refuse_server(connection.vendor)
    is_open = connection.in_atomic_block or not connection.get_autocommit()
    if not (is_open or alone):
        _refuse_autocommit("`with transaction.atomic():`")
    if connection.needs_rollback:
        _refuse_failed()
    # Raise Django's own errors, by which it learns of the connection's state.
    with connection.wrap_database_errors:
        connection.ensure_connection()
        return run_steps(connection.connection, steps, alone)


async def _perform_async(caller: Any, steps: Steps[R], alone: bool) -> R:
    connection = _registered(caller)
    if not isinstance(connection, psycopg.AsyncConnection):
        connection = await connection.run_sync(partial(_unwrap, alone=alone))
        if not isinstance(connection, psycopg.AsyncConnection):
            return cast(
                "R",
                await _registered(caller).run_sync(
                    lambda _: _drive(
                        lambda s: _run_sqlalchemy(connection, s), steps, _sleep_async
                    )
                ),
            )
    _check(connection, alone)
    answer: Rows | None = None
    while True:
        try:
            step = steps.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            return cast("R", end.value)
        if isinstance(step, Pause):
            answer = await asyncio.sleep(step.seconds, [])
        else:
            answer = await _run_psycopg_async(connection, step)


def _drive(
    run: Callable[[Fetch | CopyIn], Rows],
    steps: Steps[R],
    sleep: Callable[[float], None] = time.sleep,
) -> R:
    answer: Rows | None = None
    while True:
        try:
            step = steps.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            return cast("R", end.value)
        if isinstance(step, Pause):
            sleep(step.seconds)
            answer = []
        else:
            answer = run(step)


def _sleep_async(seconds: float) -> None:
    """Let others run on the event loop, from within SQLAlchemy's ``run_sync``."""
    from sqlalchemy.util import await_only

    await_only(asyncio.sleep(seconds))


def _run_psycopg(connection: psycopg.Connection[Any], step: Fetch | CopyIn) -> Rows:
    if isinstance(step, CopyIn):
        with connection.cursor() as cursor, cursor.copy(step.query) as copy:
            for block in step.blocks:
                copy.write(block)
        return []
    with connection.lock:
        exchange = libpq.exchange(connection, step.statement, step.parameters)
        if exchange is not None:
            try:
                return connection.wait(exchange)
            except BaseException:
                libpq.abandon(connection.pgconn)
                raise
    with connection.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(step.statement.named, step.parameters).fetchall()


def _run_alone(caller: Autocommit, step: Fetch | CopyIn) -> Rows:
    if isinstance(step, CopyIn):
        raise NoTransactionError("many rows need a transaction: give a connection")
    with caller.alone() as connection, connection.lock:
        return connection.wait(
            libpq.send_alone(connection, step.statement, step.parameters)
        )


async def _run_psycopg_async(
    connection: psycopg.AsyncConnection[Any], step: Fetch | CopyIn
) -> Rows:
    if isinstance(step, CopyIn):
        async with connection.cursor() as cursor, cursor.copy(step.query) as copy:
            for block in step.blocks:
                await copy.write(block)
        return []
    async with connection.lock:
        exchange = libpq.exchange(connection, step.statement, step.parameters)
        if exchange is not None:
            try:
                return await connection.wait(exchange)
            except BaseException:
                libpq.abandon(connection.pgconn)
                raise
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(step.statement.named, step.parameters)
        return await cursor.fetchall()


def _run_sqlalchemy(connection: SQLAlchemyConnection, step: Fetch | CopyIn) -> Rows:
    if isinstance(step, CopyIn):
        for fetch in step.instead():
            _execute(connection, fetch)
        return []
    return [tuple(row) for row in _execute(connection, step)]


def _execute(connection: SQLAlchemyConnection, fetch: Fetch) -> CursorResult[Any]:
    return connection.execute(fetch.statement.bound(fetch.parameters), fetch.parameters)


def _registered(caller: Any) -> Any:
    """Return the session of this thread or task behind a scoped session."""
    registry = getattr(caller, "registry", None)
    return caller if registry is None else registry()


def _check(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], alone: bool
) -> None:
    status = connection.pgconn.transaction_status
    if status == pq.TransactionStatus.IDLE and connection.autocommit and not alone:
        _refuse_autocommit("`with conn.transaction():`")
    if status == pq.TransactionStatus.INERROR:
        _refuse_failed()


def _refuse_autocommit(way_out: str) -> None:
    raise NoTransactionError(
        "this connection is in autocommit mode and no transaction is open, so the job "
        f"would be committed without your change: wrap both in {way_out}"
    )


def _refuse_failed() -> None:
    raise NoTransactionError(
        "an earlier statement of this transaction failed: roll back first"
    )


def _unwrap(caller: Any, alone: bool) -> Any:
    """Return the psycopg connection behind an SQLAlchemy one, or SQLAlchemy's itself.

    It uses duck typing: a caller without SQLAlchemy must not pay for its import.
    """
    caller = _registered(caller)
    connect = getattr(caller, "connection", None)
    # A Session has connection() as a method; a Connection has it as an attribute.
    opened = connect() if callable(connect) else caller
    dialect = getattr(opened, "dialect", None)
    if getattr(dialect, "name", None) != "postgresql":
        if dialect is None:
            unsuited.refuse(caller)
        unsuited.refuse_server(dialect.name)
    if not hasattr(opened, "in_transaction"):
        unsuited.refuse(caller)
    if not opened.in_transaction():
        opened.begin()
    driver = opened.connection.driver_connection
    if isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        return driver
    if getattr(opened.connection.dbapi_connection, "autocommit", False) and not alone:
        _refuse_autocommit("a transaction of a connection without AUTOCOMMIT")
    info = getattr(driver, "info", None)  # psycopg2 has it, asyncpg has not
    if getattr(info, "transaction_status", None) == pq.TransactionStatus.INERROR:
        _refuse_failed()
    return opened
