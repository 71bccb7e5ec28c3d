"""The trouble of one entity or one shard is not that of the others."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from jobs_lib import operating
from jobs_lib.partitioner import choose_shard
from tests.support.apps import count, heard, make_app, running

pytestmark = pytest.mark.expects("fenced")


def key_of_shard(topic: str, shard: int, shards: int = 16) -> str:
    return next(
        key
        for key in (f"k{n}" for n in range(10_000))
        if choose_shard(topic, key, shards) == shard
    )


@pytest.fixture
def app(database_url, bootstrap_servers):
    """An app with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)


@pytest.fixture
def declare(app, topic):
    """A function that declares a topic whose states a function loads."""

    def declare(load):
        states = app.topic(topic(1), value=dict[str, int])
        app.entity(states, source=states.name, key="id")(load)
        return states

    return declare


@pytest.mark.guarantee("I10", "FK10")
@pytest.mark.parametrize(
    "error", [psycopg.errors.QueryCanceled, psycopg.OperationalError]
)
def test_a_loader_whose_database_fails_holds_its_own_keys_alone(
    app, declare, topic, database, admin, connect, wait_for, error
):
    failing = threading.Event()
    failing.set()

    def load(connection, keys: list[str]) -> dict[str, dict[str, int]]:
        if failing.is_set():
            raise error("the statement took too long")
        return {key: {"n": 1} for key in keys}

    broken = declare(load)
    good = app.topic(topic(1), value=dict[str, int])
    with connect() as connection:
        for n in range(200):
            good.send(connection, key=f"k{n}", value={"n": n})
        broken.send_current(connection, key=key_of_shard(broken.name, 0))
    with heard("loop.failed") as failed, running(app, "relay"):
        wait_for(
            lambda: (count(admin, "outbox"), count(admin, "held_rows")) == (0, 1),
            timeout=60,
            what="all but one row left, from all shards",
        )
        (hold,) = operating.list_holds(database)
        assert "took too long" in hold.error
        failing.clear()
        operating.retry_holds(database)
        wait_for(lambda: count(admin, "held_rows") == 0, timeout=60, what="it left")
    assert not failed


def test_a_loader_that_always_fails_is_not_asked_for_each_key(
    app, declare, topic, admin, connect, wait_for, monkeypatch
):
    monkeypatch.setattr("jobs_lib.outbox.reader._SEARCH_SECONDS", 0.0)
    asked: list[int] = []

    def load(connection, keys: list[str]) -> dict[str, Any]:
        asked.append(len(keys))
        raise psycopg.OperationalError("connection timeout expired")

    broken = declare(load)
    keys = [f"k{n}" for n in range(2_000)]
    keys = [key for key in keys if choose_shard(broken.name, key, 16) == 3]
    with connect() as connection:
        for key in keys:
            broken.send_current(connection, key=key)
    # Held ones are tried by themselves later on.
    with running(app, "relay"):
        wait_for(
            lambda: count(admin, "held_rows") == len(keys), timeout=60, what="held"
        )
    assert asked[0] == len(keys)
    assert asked[1:].count(1) == len(asked) - 1


@pytest.mark.guarantee("I10")
@pytest.mark.expects("loop.failed")
def test_a_shard_that_costs_the_connection_does_not_come_first_every_time(
    app, declare, topic, admin, connect, wait_for
):
    killed = []

    def load(connection, keys: list[str]) -> dict[str, dict[str, int]]:
        killed.append(keys)
        admin.execute("select pg_terminate_backend(%s)", [connection.info.backend_pid])
        connection.execute("select 1")
        return {}

    broken = declare(load)
    good = app.topic(topic(1), value=dict[str, int])
    with connect() as connection:
        # Of all shards; a sender comes to the one that costs its connection first.
        for n in range(200):
            good.send(connection, key=f"k{n}", value={"n": n})
        broken.send_current(connection, key=key_of_shard(broken.name, 0))
    with running(app, "relay"):
        wait_for(
            lambda: count(admin, "outbox where shard <> 0") == 0,
            timeout=60,
            what="the rows of all other shards left",
        )
        wait_for(lambda: len(killed) > 4, timeout=60, what="it was tried again")
