"""Enqueue: in the caller's transaction, in the order of commit, refused at the door."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from jobs_lib import EnqueueError, Job, NoTransactionError, PayloadError
from jobs_lib.errors import TopicError
from jobs_lib.jobs.context import handling
from jobs_lib.partitioner import choose_partition
from jobs_lib.schema import sqlalchemy_url
from tests.support.apps import make_app


@pytest.fixture
def notify(database_url):
    """A job type with a group."""
    app = make_app(database_url)

    @app.job(group="customer")
    def notify(job: Job, order: int, customer: str | None = None) -> None: ...

    return notify


@pytest.fixture
def engine(database_url):
    """An SQLAlchemy engine on the test's database."""
    engine = create_engine(sqlalchemy_url(database_url))
    yield engine
    engine.dispose()


@pytest.fixture
def orders(connect):
    """A table of the caller's own."""
    with connect(autocommit=True) as connection:
        connection.execute("create table orders (id int)")


def count(connect, table: str) -> int:
    with connect(autocommit=True) as connection:
        return connection.execute(f"select count(*) from {table}").fetchone()[0]


def with_psycopg(connect, engine, notify, fail):
    with connect() as connection:
        connection.execute("insert into orders values (1)")
        notify.enqueue(connection, order=1)
        fail()


def with_psycopg_autocommit(connect, engine, notify, fail):
    with connect(autocommit=True) as connection, connection.transaction():
        connection.execute("insert into orders values (1)")
        notify.enqueue(connection, order=1)
        fail()


def with_sqlalchemy_connection(connect, engine, notify, fail):
    with engine.begin() as connection:
        notify.enqueue(connection, order=1)
        connection.execute(text("insert into orders values (1)"))
        fail()


def with_sqlalchemy_session(connect, engine, notify, fail):
    with Session(engine) as session, session.begin():
        session.execute(text("insert into orders values (1)"))
        notify.enqueue(session, order=1)
        fail()


WAYS = [
    with_psycopg,
    with_psycopg_autocommit,
    with_sqlalchemy_connection,
    with_sqlalchemy_session,
]


@pytest.mark.guarantee("S2")
@pytest.mark.parametrize("way", WAYS)
def test_a_commit_keeps_the_change_and_the_job(connect, engine, notify, orders, way):
    way(connect, engine, notify, lambda: None)
    assert (count(connect, "orders"), count(connect, "jobs_lib.jobs")) == (1, 1)


@pytest.mark.guarantee("S2")
@pytest.mark.parametrize("way", WAYS)
def test_an_error_after_the_enqueue_keeps_neither(connect, engine, notify, orders, way):
    def fail():
        raise RuntimeError("after the enqueue")

    with pytest.raises(RuntimeError, match="after the enqueue"):
        way(connect, engine, notify, fail)
    assert (count(connect, "orders"), count(connect, "jobs_lib.jobs")) == (0, 0)


def test_a_rolled_back_savepoint_keeps_no_job(connect, notify):
    with connect() as connection:
        notify.enqueue(connection, order=1)
        with connection.transaction(force_rollback=True):
            notify.enqueue(connection, order=2)
    with connect() as connection:
        kept = connection.execute("select payload from jobs_lib.jobs").fetchall()
    assert kept == [({"order": 1},)]


@pytest.mark.guarantee("W15")
def test_an_autocommit_connection_without_a_transaction_is_refused(
    connect, engine, database_url, notify
):
    app = make_app(database_url)
    topic = app.topic("orders")
    with connect(autocommit=True) as connection:
        with pytest.raises(NoTransactionError, match=r"with conn.transaction\(\)"):
            notify.enqueue(connection, order=1)
        with pytest.raises(NoTransactionError, match=r"with conn.transaction\(\)"):
            notify.enqueue_many(connection, [{"order": 1}])
        with pytest.raises(NoTransactionError, match=r"with conn.transaction\(\)"):
            topic.send(connection, key="1", value={})
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as connection, pytest.raises(NoTransactionError):
        notify.enqueue(connection, order=1)
    with pytest.raises(NoTransactionError, match="psycopg Connection"):
        notify.enqueue(object(), order=1)
    assert count(connect, "jobs_lib.jobs") == 0
    assert count(connect, "jobs_lib.outbox") == 0


def test_an_enqueue_on_a_failed_transaction_says_so(connect, notify):
    with connect() as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("select 1/0")
        with pytest.raises(NoTransactionError, match="roll back first"):
            notify.enqueue(connection, order=1)
        connection.rollback()


@pytest.mark.parametrize(
    ("payload", "match"),
    [
        ({}, "order"),
        ({"order": "seven"}, "order"),
        ({"order": 1, "colour": "red"}, "colour"),
        ({"order": 1, "customer": "a\0b"}, "NUL"),
        ({"order": 1, "customer": "\ud800"}, "order|JSON|customer"),
        ({"order": 1, "customer": ""}, "1 to 1000 bytes"),
        ({"order": 1, "customer": "x" * 1001}, "1 to 1000 bytes"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_the_transaction_lives_on(
    connect, notify, payload, match
):
    with connect() as connection:
        notify.enqueue(connection, order=1)
        with pytest.raises(PayloadError, match=match):
            notify.enqueue(connection, **payload)
        with pytest.raises(PayloadError, match=match):
            notify.enqueue_many(connection, [{"order": 2}, payload])
        notify.enqueue(connection, order=3)
    with connect() as connection:
        kept = connection.execute(
            "select payload from jobs_lib.jobs order by id"
        ).fetchall()
    assert kept == [({"order": 1},), ({"order": 3},)]


def test_a_time_without_a_zone_is_refused(notify):
    with pytest.raises(EnqueueError, match="time zone"):
        notify.options(run_at=datetime(2026, 1, 1))


@pytest.mark.guarantee("S8")
def test_the_origin_is_the_groups_else_the_handled_records(connect, notify):
    with connect() as connection:
        notify.enqueue(connection, order=1, customer="c-7")
        with handling("local/3"):
            notify.enqueue(connection, order=2)
            notify.enqueue(connection, order=3, customer="c-7")
        notify.options(origin="local/5").enqueue(connection, order=4, customer="c-7")
        notify.enqueue_many(connection, [{"order": 5, "customer": "c-7"}])
        rows = connection.execute(
            "select (payload->>'order')::int, origin from jobs_lib.jobs order by id"
        ).fetchall()
        of_group = f"local/{choose_partition('c-7', 16)}"
        assert rows == [
            (1, of_group),
            (2, "local/3"),
            (3, of_group),
            (4, "local/5"),
            (5, of_group),
        ]
        with pytest.raises(TopicError, match="elsewhere"):
            notify.options(origin="elsewhere/1").enqueue(connection, order=6)


def test_ids_of_a_group_are_drawn_in_the_order_of_commit(connect, notify, wait_for):
    # The second enqueue starts while the first transaction is open, and must wait.
    first = connect()
    early = notify.enqueue(first, order=1, customer="c")
    late: list[int] = []

    def enqueue():
        with connect() as second:
            late.append(notify.enqueue(second, order=2, customer="c"))

    thread = threading.Thread(target=enqueue)
    thread.start()
    watch = connect(autocommit=True)
    wait_for(
        lambda: watch.execute(
            "select count(*) from pg_locks where locktype = 'advisory' and not granted"
            " and database = (select oid from pg_database"
            "                 where datname = current_database())"
        ).fetchone()[0],
        what="the second enqueue waits for the group's lock",
    )
    # Drawn while the other waits: it must still get the lower id.
    between = notify.enqueue(first, order=3, customer="c")
    first.commit()
    thread.join()
    assert early < between < late[0]


def test_without_order_nobody_waits(connect, notify):
    first = connect()
    notify.enqueue(first, order=1, customer="c")
    with connect() as second:
        second.execute("set lock_timeout = '2s'")
        notify.options(ordered=False).enqueue(second, order=2, customer="c")
    first.rollback()


@pytest.mark.parametrize("groups", [3, 200])
def test_a_bulk_enqueue_waits_for_its_groups_too(connect, notify, groups):
    first = connect()
    notify.enqueue(first, order=1, customer="c1")
    payloads = [{"order": n, "customer": f"c{n}"} for n in range(groups)]
    with connect() as second:
        second.execute("set lock_timeout = '200ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            notify.enqueue_many(second, payloads)
    first.rollback()


def test_a_bulk_enqueue_keeps_order_and_every_character(connect, database_url):
    app = make_app(database_url)

    @app.job(group="key")
    def store(job: Job, key: str, text: str) -> None: ...

    awkward = [
        "tab\there",
        "line\nbreak",
        "back\\slash",
        "\\N",
        'quo"te',
        "ü€𝄞",
        "\r\x01",
    ]
    payloads = [{"key": f"k\\{text}", "text": text} for text in awkward]
    with connect() as connection:
        assert store.enqueue_many(connection, payloads) == len(awkward)
    with connect() as connection:
        rows = connection.execute(
            'select payload, "group" from jobs_lib.jobs order by id'
        ).fetchall()
    assert rows == [(payload, payload["key"]) for payload in payloads]


def test_a_bulk_enqueue_can_be_for_later(connect, notify):
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    with connect() as connection:
        notify.options(run_at=tomorrow).enqueue_many(connection, [{"order": 1}])
        row = connection.execute("select state, run_at from jobs_lib.jobs").fetchone()
    assert row == ("scheduled", tomorrow)
