"""Run steps on the caller's connection, in its open transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from jobs_lib.callers import libpq, unsuited
from jobs_lib.callers.caller import is_autocommit
from jobs_lib.callers.steps import CopyIn, Fetch
from jobs_lib.errors import NoTransactionError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from sqlalchemy import Connection as SQLAlchemyConnection
    from sqlalchemy import CursorResult

    from jobs_lib.callers.caller import AsyncCaller, Caller, DjangoConnection
    from jobs_lib.callers.steps import Rows, Steps

R = TypeVar("R")


def run_steps(
    caller: Caller | AsyncCaller, steps: Steps[R]
) -> R | Coroutine[Any, Any, R]:
    """Run the steps in the caller's transaction; on async connections, when awaited.

    Raises:
        NoTransactionError: the steps would not commit with the caller's change.
    """
    if isinstance(caller, psycopg.Connection):
        _check(caller)
        return _drive(lambda step: _run_psycopg(caller, step), steps)
    if is_autocommit(caller):
        with caller.alone() as connection:
            return _drive(lambda step: _run_alone(connection, step), steps)
    if is_async(caller):
        return _perform_async(caller, steps)
    if is_django(caller):
        return _perform_django(caller, steps)
    connection = _unwrap(caller)
    if isinstance(connection, psycopg.Connection):
        return run_steps(connection, steps)
    return _drive(lambda step: _run_sqlalchemy(connection, step), steps)


def driver_connection(caller: Caller | AsyncCaller) -> psycopg.Connection[Any]:
    """Return the caller's psycopg connection.

    Raises:
        NoTransactionError: the caller uses another driver, or an async connection.
    """
    if is_django(caller):
        caller = cast("Any", caller).connection
    elif not isinstance(caller, psycopg.Connection) and not is_async(caller):
        caller = _unwrap(caller)
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


def _perform_django(connection: Any, steps: Steps[R]) -> R | Coroutine[Any, Any, R]:
    """Run on the driver's connection behind Django's: psycopg 3, if it is installed."""
    if connection.vendor != "postgresql":
        unsuited.refuse_server(connection.vendor)
    if not connection.in_atomic_block and connection.get_autocommit():
        _refuse_autocommit("`with transaction.atomic():`")
    if connection.needs_rollback:
        _refuse_failed()
    # Raise Django's own errors, by which it learns of the connection's state.
    with connection.wrap_database_errors:
        connection.ensure_connection()
        return run_steps(connection.connection, steps)


async def _perform_async(caller: Any, steps: Steps[R]) -> R:
    connection = _registered(caller)
    if not isinstance(connection, psycopg.AsyncConnection):
        connection = await connection.run_sync(_unwrap)
        if not isinstance(connection, psycopg.AsyncConnection):
            return cast(
                "R",
                await _registered(caller).run_sync(
                    lambda _: _drive(lambda s: _run_sqlalchemy(connection, s), steps)
                ),
            )
    _check(connection)
    answer: Rows | None = None
    while True:
        try:
            step = steps.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            return cast("R", end.value)
        answer = await _run_psycopg_async(connection, step)


def _drive(run: Callable[[Fetch | CopyIn], Rows], steps: Steps[R]) -> R:
    answer: Rows | None = None
    while True:
        try:
            step = steps.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            return cast("R", end.value)
        answer = run(step)


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


def _run_alone(connection: psycopg.Connection[Any], step: Fetch | CopyIn) -> Rows:
    if isinstance(step, CopyIn):
        raise NoTransactionError("many rows need a transaction: give a connection")
    with connection.lock:
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


def _check(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    status = connection.pgconn.transaction_status
    if status == pq.TransactionStatus.IDLE and connection.autocommit:
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


def _unwrap(caller: Any) -> Any:
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
    if getattr(opened.connection.dbapi_connection, "autocommit", False):
        _refuse_autocommit("a transaction of a connection without AUTOCOMMIT")
    info = getattr(driver, "info", None)  # psycopg2 has it, asyncpg has not
    if getattr(info, "transaction_status", None) == pq.TransactionStatus.INERROR:
        _refuse_failed()
    return opened
