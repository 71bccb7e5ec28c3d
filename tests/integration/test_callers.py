"""Enqueue and send on every kind of connection that a caller may have."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import (
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from jobs_lib import Job, NoTransactionError, PayloadError
from tests.support.apps import make_app
from tests.support.engines import sqlalchemy_url

if TYPE_CHECKING:
    from collections.abc import Callable


class UndoError(Exception):
    """Raised to roll a transaction back."""


@dataclass
class Hand:
    """A kind of a caller's connection, and the caller's way to use it."""

    caller: Any
    execute: Callable[[str], Any]
    savepoint: Callable[[], Any]


async def settle(result):
    """Return the result of a call on a connection of either kind."""
    return await result if inspect.isawaitable(result) else result


@asynccontextmanager
async def either(manager):
    """Enter a context manager of either kind."""
    if hasattr(manager, "__aenter__"):
        async with manager as value:
            yield value
    else:
        with manager as value:
            yield value


@asynccontextmanager
async def psycopg_connection(app):
    with psycopg.connect(app.settings.database_url) as connection:
        yield Hand(connection, connection.execute, connection.transaction)


@asynccontextmanager
async def psycopg_in_autocommit(app):
    url = app.settings.database_url
    with psycopg.connect(url, autocommit=True) as connection, connection.transaction():
        yield Hand(connection, connection.execute, connection.transaction)


@asynccontextmanager
async def psycopg_serializable(app):
    with psycopg.connect(app.settings.database_url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        yield Hand(connection, connection.execute, connection.transaction)


@asynccontextmanager
async def psycopg_in_latin1(app):
    with psycopg.connect(
        app.settings.database_url, client_encoding="latin1"
    ) as connection:
        yield Hand(connection, connection.execute, connection.transaction)


@asynccontextmanager
async def psycopg_pipeline(app):
    with (
        psycopg.connect(app.settings.database_url) as connection,
        connection.pipeline(),
    ):
        yield Hand(connection, connection.execute, connection.transaction)


@asynccontextmanager
async def psycopg_async(app):
    url = app.settings.database_url
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield Hand(connection, connection.execute, connection.transaction)


@asynccontextmanager
async def app_transaction(app):
    with app.transaction() as connection:
        yield Hand(connection, connection.execute, connection.transaction)


@asynccontextmanager
async def app_transaction_async(app):
    try:
        async with app.transaction() as connection:
            yield Hand(connection, connection.execute, connection.transaction)
    finally:
        await app.aclose()


@contextmanager
def engine_of(app, driver, **options):
    """An SQLAlchemy engine that leaves no connection open."""
    url = sqlalchemy_url(app.settings.database_url)
    engine = create_engine(url.set(drivername=f"postgresql+{driver}"), **options)
    try:
        yield engine
    finally:
        engine.dispose()


@asynccontextmanager
async def async_engine_of(app, driver, **options):
    """An asynchronous SQLAlchemy engine that leaves no connection open."""
    url = sqlalchemy_url(app.settings.database_url)
    engine = create_async_engine(url.set(drivername=f"postgresql+{driver}"), **options)
    try:
        yield engine
    finally:
        await engine.dispose()


def sqlalchemy_connection(driver):
    @asynccontextmanager
    async def open(app):
        with engine_of(app, driver) as engine, engine.begin() as connection:
            yield Hand(
                connection,
                lambda sql: connection.execute(text(sql)),
                connection.begin_nested,
            )

    open.__name__ = f"sqlalchemy_connection_{driver}"
    return open


def sqlalchemy_session(driver, *, scoped=False):
    @asynccontextmanager
    async def open(app):
        with engine_of(app, driver) as engine:
            registry = scoped_session(sessionmaker(engine))
            with registry() as session, session.begin():
                caller = registry if scoped else session
                yield Hand(
                    caller, lambda sql: session.execute(text(sql)), session.begin_nested
                )

    open.__name__ = f"sqlalchemy_{'scoped_' if scoped else ''}session_{driver}"
    return open


def sqlalchemy_async_connection(driver):
    @asynccontextmanager
    async def open(app):
        async with (
            async_engine_of(app, driver) as engine,
            engine.begin() as connection,
        ):
            yield Hand(
                connection,
                lambda sql: connection.execute(text(sql)),
                connection.begin_nested,
            )

    open.__name__ = f"sqlalchemy_async_connection_{driver}"
    return open


def sqlalchemy_async_session(driver, *, scoped=False):
    @asynccontextmanager
    async def open(app):
        async with async_engine_of(app, driver) as engine:
            registry = async_scoped_session(
                async_sessionmaker(engine), asyncio.current_task
            )
            async with registry() as session, session.begin():
                caller = registry if scoped else session
                yield Hand(
                    caller, lambda sql: session.execute(text(sql)), session.begin_nested
                )
            await registry.remove()

    open.__name__ = f"sqlalchemy_async_{'scoped_' if scoped else ''}session_{driver}"
    return open


WAYS = [
    psycopg_connection,
    psycopg_in_autocommit,
    psycopg_serializable,
    psycopg_in_latin1,
    psycopg_async,
    app_transaction,
    app_transaction_async,
    *(sqlalchemy_connection(driver) for driver in ("psycopg", "psycopg2")),
    *(sqlalchemy_session(driver) for driver in ("psycopg", "psycopg2")),
    sqlalchemy_session("psycopg", scoped=True),
    *(sqlalchemy_async_connection(driver) for driver in ("psycopg", "asyncpg")),
    *(sqlalchemy_async_session(driver) for driver in ("psycopg", "asyncpg")),
    sqlalchemy_async_session("asyncpg", scoped=True),
]


@pytest.fixture
def app(database_url):
    """An app whose pooled connections are closed at the end."""
    app = make_app(database_url)
    yield app
    app.close()


@pytest.fixture
def app_with_one(database_url):
    """An app with one connection for all callers, and one of its job types."""
    app = make_app(database_url, transactions=1)

    @app.job()
    def notify(job: Job, order: int) -> None: ...

    yield app, notify
    app.close()


@pytest.mark.guarantee("S2", "J1", "FJ14")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_jobs_and_messages_follow_the_callers_transaction(app, notify, connect, way):
    topic = app.topic("orders")
    admin = connect(autocommit=True)
    admin.execute("create table orders (id int)")

    async def work(*, fail):
        async with way(app) as hand:
            caller = hand.caller
            first = await settle(notify.enqueue(caller, order=1, customer="ünal:1 %s"))
            assert isinstance(first, int)
            await settle(hand.execute("insert into orders values (1)"))
            with suppress(UndoError):
                async with either(hand.savepoint()):
                    await settle(notify.enqueue(caller, order=2))
                    raise UndoError
            many = [{"order": n, "customer": "back\\slash: ünal"} for n in (3, 4)]
            assert await settle(notify.enqueue_many(caller, many)) == 2
            sent = await settle(topic.send(caller, key="ü", value={"a": 1}, version=7))
            assert isinstance(sent, int)
            more = [("ü\\2", {"a": "ü"}, 8)]
            assert await settle(topic.send_many(caller, more)) == 1
            if fail:
                raise UndoError

    with pytest.raises(UndoError):
        asyncio.run(work(fail=True))
    for table in ("orders", "jobs_lib.jobs", "jobs_lib.outbox"):
        assert admin.execute(f"select count(*) from {table}").fetchone() == (0,)
    asyncio.run(work(fail=False))
    rows = admin.execute(
        "select (payload ->> 'order')::int, \"group\" from jobs_lib.jobs order by id"
    ).fetchall()
    later = "back\\slash: ünal"
    assert rows == [(1, "ünal:1 %s"), (3, later), (4, later)]
    assert admin.execute(
        "select key, value, version from jobs_lib.outbox order by id"
    ).fetchall() == [
        ("ü", b'{"a":1}', 7),
        ("ü\\2", '{"a":"ü"}'.encode(), 8),
    ]
    assert admin.execute("select id from orders").fetchall() == [(1,)]


def test_an_app_writes_utf_8_whatever_encoding_its_environment_asks_for(
    app, notify, connect, monkeypatch
):
    topic = app.topic("orders")
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    notify.enqueue(app, order=1, customer="ünal €")
    notify.enqueue_many(app, [{"order": 2, "customer": "ünal €"}])
    topic.send(app, key="ünal €", value={})
    topic.send_many(app, [("ünal €", {}, None)])
    monkeypatch.undo()
    with connect() as connection:
        stored = connection.execute(
            "select payload ->> 'customer' from jobs_lib.jobs"
            ' union all select "group" from jobs_lib.jobs'
            " union all select key from jobs_lib.outbox"
        ).fetchall()
    assert stored == [("ünal €",)] * 6


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_an_enqueue_opens_the_transaction_that_sqlalchemy_commits(
    app, notify, connect, driver
):
    with engine_of(app, driver) as engine, engine.connect() as connection:
        notify.enqueue(connection, order=1)
        connection.commit()
        notify.enqueue(connection, order=2)
    with connect() as connection:
        rows = connection.execute("select payload from jobs_lib.jobs").fetchall()
    assert rows == [({"order": 1},)]


def test_a_connection_in_pipeline_mode_is_used_as_it_is(app, notify, connect):
    async def work():
        async with psycopg_pipeline(app) as hand:
            notify.enqueue(hand.caller, order=1)

    asyncio.run(work())
    with connect() as connection:
        assert connection.execute("select count(*) from jobs_lib.jobs").fetchone() == (
            1,
        )


@pytest.mark.guarantee("W15")
def test_calls_without_a_transaction_are_refused(app, notify, connect):
    topic = app.topic("orders")

    def refused(caller):
        for call in (
            lambda: notify.enqueue(caller, order=1),
            lambda: notify.enqueue_many(caller, [{"order": 1}]),
            lambda: topic.send(caller, key="1", value={}),
        ):
            with pytest.raises(NoTransactionError, match="wrap both in"):
                call()

    refused(connect(autocommit=True))
    for driver in ("psycopg", "psycopg2"):
        with engine_of(app, driver, isolation_level="AUTOCOMMIT") as engine:
            with engine.connect() as connection:
                refused(connection)
            with Session(engine) as session:
                refused(session)

    async def refused_async():
        async with await psycopg.AsyncConnection.connect(
            app.settings.database_url, autocommit=True
        ) as connection:
            with pytest.raises(NoTransactionError, match="wrap both in"):
                await notify.enqueue(connection, order=1)
        for driver in ("psycopg", "asyncpg"):
            async with (
                async_engine_of(app, driver, isolation_level="AUTOCOMMIT") as engine,
                engine.connect() as connection,
            ):
                with pytest.raises(NoTransactionError, match="wrap both in"):
                    await notify.enqueue(connection, order=1)

    asyncio.run(refused_async())
    with connect() as connection:
        for table in ("jobs", "outbox"):
            row = connection.execute(
                f"select count(*) from jobs_lib.{table}"
            ).fetchone()
            assert row == (0,)


def test_an_object_that_is_no_postgresql_connection_is_refused(notify):
    with pytest.raises(NoTransactionError, match=r"builtins\.object: give a psycopg"):
        notify.enqueue(object(), order=1)
    with (
        create_engine("sqlite://").connect() as connection,
        pytest.raises(NoTransactionError, match="cannot write on sqlite"),
    ):
        notify.enqueue(connection, order=1)


@pytest.mark.guarantee("U4")
def test_an_engine_maker_pool_or_cursor_is_refused_with_the_way_to_a_connection(
    app, notify, connect
):
    url = app.settings.database_url
    topic = app.topic("orders")

    def refused(given: Any, says: str) -> None:
        for call in (
            lambda: notify.enqueue(given, order=1),
            lambda: notify.enqueue_many(given, [{"order": 1}]),
            lambda: topic.send(given, key="1", value={}),
        ):
            with pytest.raises(NoTransactionError) as refusal:
                call()
            assert f".{type(given).__name__}: " in str(refusal.value)
            assert says in str(refusal.value)

    begin = "write `with engine.begin() as connection:`"
    with engine_of(app, "psycopg") as engine:
        refused(engine, begin)
        refused(sessionmaker(engine), "`with maker.begin() as session:`")
    asynchronous = create_async_engine(sqlalchemy_url(url))
    refused(asynchronous, "write `async with engine.begin() as connection:`")
    refused(async_sessionmaker(asynchronous), "`async with maker.begin() as session:`")
    with ConnectionPool(url, min_size=0, max_size=1) as pool:
        refused(pool, "write `with pool.connection() as connection:`")
    refused(connect().cursor(), "give its connection, `cursor.connection`")


def test_enqueue_on_a_failed_transaction_asks_to_roll_back_first(app, notify, connect):
    with connect() as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("select 1/0")
        with pytest.raises(NoTransactionError, match="roll back first"):
            notify.enqueue(connection, order=1)
        connection.rollback()
    with engine_of(app, "psycopg2") as engine, engine.connect() as connection:
        with pytest.raises(Exception, match="division by zero"):
            connection.execute(text("select 1/0"))
        with pytest.raises(NoTransactionError, match="roll back first"):
            notify.enqueue(connection, order=1)


def test_an_enqueue_that_the_server_refuses_leaves_a_usable_connection(notify, connect):
    connection = connect()
    admin = connect(autocommit=True)
    notify.enqueue(connection, order=1)
    connection.rollback()
    admin.execute("alter table jobs_lib.jobs rename to gone")
    # BEGIN and the statement travel together: the error must not leave a pipeline open.
    with pytest.raises(psycopg.errors.UndefinedTable):
        notify.enqueue(connection, order=1)
    connection.rollback()
    admin.execute("alter table jobs_lib.gone rename to jobs")
    notify.enqueue(connection, order=1)
    connection.commit()
    assert admin.execute("select count(*) from jobs_lib.jobs").fetchone() == (1,)


def test_a_cancelled_enqueue_leaves_a_usable_connection(app, notify, connect, wait_for):
    first = connect()
    notify.enqueue(first, order=1, customer="c")
    watch = connect(autocommit=True)

    def waits():
        return watch.execute(
            "select count(*) from pg_locks where locktype = 'advisory' and not granted"
            " and database = (select oid from pg_database"
            "                 where datname = current_database())"
        ).fetchone()[0]

    async def work():
        connection = await psycopg.AsyncConnection.connect(app.settings.database_url)
        task = asyncio.create_task(notify.enqueue(connection, order=2, customer="c"))
        await asyncio.to_thread(wait_for, waits, what="the enqueue waits for the group")
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            # Roll back even while the error is alive.
            await connection.rollback()
        await notify.enqueue(connection, order=3)
        await connection.commit()
        await connection.close()

    asyncio.run(work())
    first.rollback()
    assert watch.execute("select payload from jobs_lib.jobs").fetchall() == [
        ({"order": 3},)
    ]


def test_a_pooled_connection_that_the_server_has_closed_is_replaced(
    app, notify, connect
):
    with app.transaction() as connection:
        pid = connection.info.backend_pid
    admin = connect(autocommit=True)
    admin.execute("select pg_terminate_backend(%s, 5000)", (pid,))
    with app.transaction() as connection:
        assert connection.info.backend_pid != pid
        notify.enqueue(connection, order=1)
    assert admin.execute("select count(*) from jobs_lib.jobs").fetchone() == (1,)


def test_an_app_enqueues_and_sends_in_transactions_of_their_own(app, notify, connect):
    topic = app.topic("orders")
    job_id = notify.enqueue(app, order=1)
    assert notify.enqueue_many(app, [{"order": 2}, {"order": 3}]) == 2
    topic.send(app, key="1", value={"order": 1})
    with pytest.raises(PayloadError):
        notify.enqueue(app, order="one")
    admin = connect()
    rows = admin.execute("select id from jobs_lib.jobs order by id").fetchall()
    assert len(rows) == 3
    assert rows[0] == (job_id,)
    assert admin.execute("select key from jobs_lib.outbox").fetchall() == [("1",)]


def test_an_apps_enqueues_and_transactions_share_its_connections(app_with_one, connect):
    app, notify = app_with_one
    for order in range(3):
        notify.enqueue(app, order=order)
        # psycopg drops prepared statements after it has rolled back.
        with suppress(UndoError), app.transaction() as connection:
            for _ in range(10):
                connection.execute("select %s::int", (order,), prepare=True)
            notify.enqueue(connection, order=100)
            raise UndoError
        with (
            pytest.raises(psycopg.errors.CheckViolation),
            app.alone() as connection,
        ):
            connection.execute("update jobs_lib.topics set partitions = 0")
    with app.transaction() as connection:
        prepared = "select name from pg_prepared_statements where name ~ '^jobs_lib_'"
        assert len(connection.execute(prepared).fetchall()) <= 1
        notify.enqueue(connection, order=3)
    admin = connect()
    found = admin.execute("select payload from jobs_lib.jobs order by id").fetchall()
    assert found == [({"order": order},) for order in range(4)]
    connections = "select count(*) from pg_stat_activity where application_name ~ %s"
    assert admin.execute(connections, ("transaction",)).fetchone() == (1,)


@pytest.mark.parametrize("way", ["transaction", "alone", "async"])
def test_what_a_caller_sets_on_a_connection_does_not_meet_the_next_one(
    app_with_one, way
):
    app, notify = app_with_one
    given = app.alone if way == "alone" else app.transaction
    asked = (
        "select 1, current_setting('transaction_isolation'),"
        " current_setting('transaction_read_only')"
    )

    def use() -> None:
        with given() as connection:
            connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
            connection.read_only = connection.deferrable = True
            connection.row_factory = dict_row
            connection.cursor_factory = psycopg.ClientCursor
            assert connection.execute("select 1 as n").fetchone() == {"n": 1}

    async def use_async() -> None:
        async with app.transaction() as connection:
            await connection.set_isolation_level(psycopg.IsolationLevel.SERIALIZABLE)
            await connection.set_read_only(True)
            await connection.set_deferrable(True)
            connection.row_factory = dict_row
        async with app.transaction() as connection:
            cursor = await connection.execute(asked)
            assert await cursor.fetchone() == (1, "read committed", "off")
            await connection.rollback()
            await connection.set_autocommit(True)
        async with app.transaction() as connection:
            assert not connection.autocommit
        await app.aclose()

    if way == "async":
        asyncio.run(use_async())
        return
    use()
    for again in (app.transaction, app.alone):
        with again() as connection:
            row = connection.execute(asked).fetchone()
            assert row == (1, "read committed", "off")
            assert type(connection.cursor()) is psycopg.Cursor
    use()
    notify.enqueue(app, order=1)


def test_a_caller_that_is_cancelled_as_it_gets_a_connection_leaves_none_behind(
    app_with_one, monkeypatch
):
    app, _ = app_with_one

    async def stop(connection) -> None:
        raise asyncio.CancelledError

    async def use() -> None:
        given = app.transaction()
        with monkeypatch.context() as patched:
            patched.setattr("jobs_lib.callers.pools._take_back_async", stop)
            with pytest.raises(asyncio.CancelledError):
                await given.__aenter__()
        # It is the only one.
        async with asyncio.timeout(20), app.transaction() as connection:
            await connection.execute("select 1")
        await app.aclose()

    asyncio.run(use())


def test_an_app_prepares_what_it_sends_once(app_with_one):
    app, notify = app_with_one

    def count_runs() -> dict[str, int]:
        with app.alone() as connection:
            return dict(
                connection.execute(
                    "select name, generic_plans + custom_plans"
                    " from pg_prepared_statements where name ~ '^jobs_lib_'"
                )
            )

    notify.enqueue(app, order=1)
    before = count_runs()
    notify.enqueue(app, order=2)
    after = count_runs()
    assert after.keys() == before.keys()
    assert sum(after.values()) == sum(before.values()) + 1


def test_event_loops_that_have_ended_leave_no_connection_open(
    database_url, admin, wait_for
):
    app = make_app(database_url)

    async def view() -> int:
        # An async view of Flask, for example, has a loop of its own for each request.
        async with app.transaction() as connection:
            return connection.info.backend_pid

    served = [asyncio.run(view()) for _ in range(10)]

    def list_open() -> list[int]:
        rows = admin.execute(
            "select pid from pg_stat_activity where pid = any (%s)", (served,)
        )
        return [pid for (pid,) in rows]

    wait_for(lambda: len(list_open()) <= 1, what=lambda: f"{list_open()} are open")
    app.close()
    wait_for(lambda: list_open() == [], what="the last one is closed, too")
