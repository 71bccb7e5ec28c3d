"""The test kit finds states that are sent before their entity is locked."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy import create_engine

from jobs_lib import App
from jobs_lib.testing.jobs import Jobs
from tests.support.engines import sqlalchemy_url

app = App("shop")
orders = app.topic("orders", compacted=True)
events = app.topic("events")


@app.entity(orders, source="orders", key="id")
def load(conn: psycopg.Connection, keys: list[str]) -> dict[str, int]:
    return {}


@pytest.fixture
def jobs_app() -> App:
    return app


@pytest.fixture(scope="session")
def jobs_database_setup():
    def setup(url: str) -> None:
        with psycopg.connect(url) as conn:
            conn.execute("create table orders (id text primary key, n int)")
            conn.execute("insert into orders values ('a', 1)")

    return setup


def test_a_state_read_without_a_lock_is_not_sent(jobs, outbox):
    with jobs.transaction() as conn:
        (n,) = conn.execute("select n from orders").fetchone()
        with pytest.raises(AssertionError, match=r"'orders'.*'a'.*for update"):
            orders.send(conn, key="a", value=n)
    engine = create_engine(sqlalchemy_url(jobs.url))
    with engine.begin() as conn, pytest.raises(AssertionError, match="locked no row"):
        orders.tombstone(conn, key="a")
    engine.dispose()
    assert outbox.sent() == []


def test_many_states_read_without_a_lock_are_not_sent(jobs, outbox):
    with jobs.transaction() as conn:
        (n,) = conn.execute("select n from orders").fetchone()
        with pytest.raises(AssertionError, match=r"'orders'.*'a'.*for update"):
            orders.send_many(conn, [("a", n, None), ("b", n, None)])
        assert orders.send_many(conn, []) == 0
        conn.execute("update orders set n = 2 where id = 'a'")
        orders.send_many(conn, [("a", 2, None)])
    outbox.assert_sent(orders, key="a", value=2)


@pytest.mark.parametrize(
    "lock",
    [
        "update orders set n = 2 where id = 'a'",
        "delete from orders",
        "insert into orders values ('b', 1)",
        "select from orders for update",
        "select from orders for no key update",
        "lock table orders in exclusive mode",
    ],
)
def test_a_state_of_a_locked_entity_is_sent(jobs, outbox, lock):
    with jobs.transaction() as conn:
        conn.execute(lock)
        orders.send(conn, key="a", value=2)
    outbox.assert_sent(orders, key="a", value=2)


def test_current_states_and_events_need_no_lock(jobs, outbox):
    with jobs.transaction() as conn:
        orders.send_current(conn, key="a")
        events.send(conn, key="a", value=1)
    assert [one.topic for one in outbox.sent()] == ["orders", "events"]


def test_the_check_can_be_turned_off(jobs_database_url):
    with Jobs(app, jobs_database_url, locked=False) as jobs, jobs.transaction() as conn:
        orders.send(conn, key="a", value=1)
