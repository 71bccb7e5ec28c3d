"""The trouble of one entity or one shard does not reach the others."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from jobs_lib import operating
from jobs_lib.outbox.relay import SENDERS
from jobs_lib.partitioner import choose_shard
from tests.support.apps import count, count_unsent, heard, make_app, running

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
    """A function that declares a topic and the loader of its states."""

    def declare(load):
        states = app.topic(topic(1), value=dict[str, int])
        app.entity(states, source=states.name, key="id")(load)
        return states

    return declare


def test_hints_are_heard_while_a_loader_keeps_one_thread_waiting(
    database_url, bootstrap_servers, topic, admin, connect, wait_for
):
    # Without a hint the relay would look for rows after ten minutes.
    app = make_app(
        database_url,
        kafka_bootstrap_servers=bootstrap_servers,
        relay_poll_interval=600.0,
    )
    slow, other = (app.topic(topic(1), value=dict[str, int]) for _ in range(2))
    loading, go_on = threading.Event(), threading.Event()

    @app.entity(slow, source="slow", key="id")
    def load(connection, keys: list[str]) -> dict[str, dict[str, int]]:
        loading.set()
        go_on.wait(120)
        return {key: {"n": 1} for key in keys}

    with connect() as connection:
        slow.send_current(connection, key=key_of_shard(slow.name, 0))
    with running(app, "relay") as service:
        try:
            relay: Any = next(one.worker for one in service._owners)
            wait_for(relay._receives_hints, timeout=60, what="hints come")
            assert loading.wait(60)
            for n in range(2):
                with connect() as connection:
                    for shard in range(1, SENDERS):
                        key = key_of_shard(other.name, shard)
                        other.send(connection, key=key, value={"n": n})
                wait_for(
                    lambda: count(admin, "outbox") == 1,
                    timeout=30,
                    what="the rows of the other threads have left",
                )
        finally:
            go_on.set()


@pytest.mark.expects("loop.failed")
def test_a_loader_that_hangs_does_not_keep_a_service_from_stopping(
    database_url, bootstrap_servers, topic, connect, wait_for
):
    app = make_app(
        database_url,
        kafka_bootstrap_servers=bootstrap_servers,
        session_timeout=1.0,
        handover_timeout=0.2,
    )
    slow = app.topic(topic(1), value=dict[str, int])
    loading, go_on = threading.Event(), threading.Event()

    @app.entity(slow, source="slow", key="id")
    def load(connection, keys: list[str]) -> dict[str, dict[str, int]]:
        loading.set()
        go_on.wait(120)
        return {}

    with connect() as connection:
        slow.send_current(connection, key="a")
    with running(app, "relay") as service:
        pulses = next(one.worker.pulses for one in service._owners)
        try:
            assert loading.wait(60)
            stopping = threading.Thread(target=service.stop)
            stopping.start()
            wait_for(lambda: not stopping.is_alive(), timeout=30, what="it has stopped")
            assert any(one.is_alive() for one in pulses)
        finally:
            go_on.set()
        wait_for(
            lambda: not any(one.is_alive() for one in pulses),
            timeout=30,
            what="its thread ends with the loader",
        )


@pytest.mark.guarantee("I10", "FK10")
@pytest.mark.parametrize(
    "error", [psycopg.errors.QueryCanceled, psycopg.OperationalError]
)
def test_a_loader_with_a_failing_database_holds_its_own_keys_alone(
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
    monkeypatch.setattr("jobs_lib.outbox.states._SEARCH_SECONDS", 0.0)
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
    # Held rows are tried one by one later.
    with running(app, "relay"):
        wait_for(
            lambda: count(admin, "held_rows") == len(keys), timeout=60, what="held"
        )
    # Nothing is known of the states, so a call for a few comes first.
    assert asked[:2] == [100, len(keys) - 100]
    assert asked[2:].count(1) == len(asked) - 2


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
        # All shards have rows; a sender reaches the row that costs its connection
        # first.
        for n in range(200):
            good.send(connection, key=f"k{n}", value={"n": n})
        broken.send_current(connection, key=key_of_shard(broken.name, 0))
    with running(app, "relay"):
        wait_for(
            lambda: count(admin, "outbox where shard <> 0") == 0,
            timeout=60,
            what="the rows of all other shards left",
        )
        wait_for(lambda: len(killed) > 2, timeout=60, what="it was tried again")


@pytest.mark.guarantee("I10", "FK10")
@pytest.mark.expects("loop.failed")
def test_a_loader_that_always_costs_the_connection_holds_its_own_keys_alone(
    app, declare, topic, database, admin, connect, wait_for
):
    killing = threading.Event()
    killing.set()
    killed = []

    def load(connection, keys: list[str]) -> dict[str, dict[str, int]]:
        if killing.is_set():
            killed.append(keys)
            pid = connection.info.backend_pid
            admin.execute("select pg_terminate_backend(%s)", [pid])
            connection.execute("select 1")
        return {key: {"n": 1} for key in keys}

    broken = declare(load)
    later = [f"k{n}" for n in range(500)]
    later = [key for key in later if choose_shard(broken.name, key, 16) == 8][:3]
    good = app.topic(topic(1), value=dict[str, int])
    with connect() as connection:
        for n in range(200):
            good.send(connection, key=f"k{n}", value={"n": n})
        # Both rows belong to one sender: it learns from the first of their shards.
        broken.send_current(connection, key=key_of_shard(broken.name, 0))
        broken.send_current(connection, key=key_of_shard(broken.name, 4))
    with running(app, "relay"):
        wait_for(
            lambda: count_unsent(admin) == (0, 2),
            timeout=60,
            what="all but two rows left, from their own shards, too",
        )
        # Later rows do not wait for the loader, and no block tries it.
        sent = len(killed)
        with connect() as connection:
            for n in range(200):
                good.send(connection, key=f"k{n}", value={"n": n})
            for key in later:
                broken.send_current(connection, key=key)
        wait_for(lambda: count_unsent(admin) == (0, 5), timeout=60, what="all left")
        assert all(len(keys) == 1 for keys in killed[sent:])
        errors = {hold.error for hold in operating.list_holds(database)}
        assert all("keeps costing the relay its connection" in one for one in errors)
        # A held row tries it repeatedly.
        wait_for(lambda: len(killed) > sent, timeout=60, what="it was tried again")
        killing.clear()

        def is_let_go() -> bool:
            operating.retry_holds(database)
            return count_unsent(admin) == (0, 0)

        wait_for(is_let_go, timeout=60, what="they left")


@pytest.mark.expects("loop.failed")
def test_a_loader_that_lost_its_connection_once_is_asked_again(
    app, declare, admin, connect, wait_for
):
    asked = []

    def load(connection, keys: list[str]) -> dict[str, dict[str, int]]:
        asked.append(keys)
        if len(asked) % 2:
            # A restart of the server does the same.
            pid = connection.info.backend_pid
            admin.execute("select pg_terminate_backend(%s)", [pid])
            connection.execute("select 1")
        return {key: {"n": 1} for key in keys}

    broken = declare(load)
    with heard("rows.held") as held, running(app, "relay"):
        for n in range(3):
            with connect() as connection:
                broken.send_current(connection, key=key_of_shard(broken.name, 0))
            wait_for(
                lambda n=n: (len(asked), count(admin, "outbox")) == (2 * n + 2, 0),
                timeout=60,
                what="it left",
            )
    assert not held
