"""A handler that takes longer than its limit fails, or is reported while it runs."""

from __future__ import annotations

import asyncio
import threading

import psycopg
import pytest

from tests.support.apps import heard, running
from tests.support.records import key_of, produce


@pytest.mark.guarantee("W78")
def test_a_handler_that_waits_in_the_database_is_cancelled_at_its_limit(
    make, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for
):
    name = topic(2)
    app = make()
    fixed = threading.Event()

    @app.consumer(name, group=f"{name}-g", timeout=1.5)
    def handle(record, conn) -> None:
        conn.execute(seen, (record.partition, record.value))
        if record.value == 3 and not fixed.is_set():
            conn.execute("select pg_sleep(60)")

    produce(bootstrap_servers, name, [(key_of(0, 2), n) for n in range(6)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=30, what="it is cancelled")
        produce(bootstrap_servers, name, [(key_of(1, 2), n) for n in range(3)])
        wait_for(
            lambda: read_offsets(name) == {0: 3, 1: 3},
            timeout=30,
            what="the others are in",
        )
        fixed.set()
        wait_for(lambda: read_offsets(name) == {0: 6, 1: 3}, timeout=30, what="all is")
    assert {fields["offset"] for _, fields in failed} == {3}
    error = failed[0][1]["error"]
    assert error.startswith(f"RecordError: the handler of the record at {name}/0 offs")
    assert "took longer than its timeout=1.5 s, so it is undone" in error
    assert read_seen() == [*range(6)]


@pytest.mark.guarantee("W78")
def test_a_handler_that_catches_the_cancellation_fails_all_the_same(
    make, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for
):
    name = topic(1)
    app = make()
    fixed = threading.Event()

    @app.consumer(name, group=f"{name}-g", timeout=0.2)
    def handle(record, conn) -> None:
        conn.execute(seen, (record.partition, record.value))
        try:
            with conn.transaction():
                conn.execute("select pg_sleep(%s)", (0 if fixed.is_set() else 60,))
        except psycopg.errors.QueryCanceled:
            # The second statement is cancelled, too.
            with conn.transaction():
                conn.execute("select pg_sleep(60)")

    produce(bootstrap_servers, name, [("k", 1)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=30, what="it fails")
        assert read_offsets(name) == {}
        fixed.set()
        wait_for(lambda: read_offsets(name) == {0: 1}, timeout=30, what="it is in")
    assert "took longer than its timeout=0.2 s" in failed[0][1]["error"]
    assert read_seen() == [1]


@pytest.mark.guarantee("W78")
def test_a_handler_that_hangs_elsewhere_is_reported_while_it_runs(
    make, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    app = make()
    go = threading.Event()
    calls: list[int] = []

    @app.consumer(name, group=f"{name}-g", timeout=0.5)
    def handle(record, conn) -> None:
        calls.append(record.offset)
        if len(calls) == 1:
            go.wait(60)

    produce(bootstrap_servers, name, [("k", 1)])
    with (
        heard("record.stuck") as stuck,
        heard("record.failed") as failed,
        running(app, "consumers"),
    ):
        wait_for(lambda: len(stuck) > 2, timeout=60, what="it is reported thrice")
        assert (calls, failed) == ([0], [])
        go.set()
        wait_for(lambda: read_offsets(name) == {0: 1}, timeout=30, what="it is in")
    first, second, third = (fields for _, fields in stuck[:3])
    assert (first["group"], first["origin"]) == (f"{name}-g", f"{name}/0")
    assert (first["offset"], first["limit"]) == (0, 0.5)
    assert first["seconds"] >= 0.5
    # Each time after twice as long, so that there are few lines. They are told in
    # tenths, which are compared as whole numbers: rounding costs one of them.
    told = [round(10 * one["seconds"]) for one in (second, third)]
    assert told[1] >= 2 * told[0] - 1
    assert "go.wait(60)" in first["stack"]
    assert "took longer than its timeout=0.5 s" in failed[0][1]["error"]
    assert calls == [0, 0]


@pytest.mark.guarantee("W78")
def test_a_handler_within_its_limit_is_left_alone(
    make, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for
):
    name = topic(1)
    app = make()

    @app.consumer(name, group=f"{name}-g", timeout=60.0)
    def handle(record, conn) -> None:
        if record.value == 3 and not failed:
            raise ValueError("an error of its own")
        conn.execute(seen, (record.partition, record.value))

    produce(bootstrap_servers, name, [("k", n) for n in range(10)])
    with (
        heard("record.failed") as failed,
        heard("record.stuck") as stuck,
        running(app, "consumers"),
    ):
        wait_for(lambda: read_offsets(name) == {0: 10}, timeout=30, what="all is in")
    assert "an error of its own" in failed[0][1]["error"]
    assert not stuck
    assert read_seen() == [*range(10)]


@pytest.mark.guarantee("W78")
def test_a_block_that_takes_too_long_is_named_by_its_records(
    make, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    app = make()

    @app.consumer(name, group=f"{name}-g", timeout=1.5, per="block")
    def handle(records, conn) -> None:
        if any(one.value == 2 for one in records):
            conn.execute("select pg_sleep(60)")

    produce(bootstrap_servers, name, [("k", n) for n in range(4)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=30, what="it is named")
        assert read_offsets(name) == {0: 2}
    assert failed[0][1]["offset"] == 2
    assert "took longer than its timeout=1.5 s" in failed[0][1]["error"]


@pytest.mark.guarantee("W78")
@pytest.mark.parametrize("where", ["database", "elsewhere"])
def test_an_async_handler_is_cancelled_at_its_limit(
    make, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for, where
):
    name = topic(1)
    app = make()
    fixed = threading.Event()

    @app.consumer(name, group=f"{name}-g", timeout=1.5)
    async def handle(record, conn) -> None:
        await conn.execute(seen, (record.partition, record.value))
        if record.value == 3 and not fixed.is_set():
            if where == "database":
                await conn.execute("select pg_sleep(60)")
            else:
                await asyncio.sleep(60)

    produce(bootstrap_servers, name, [("k", n) for n in range(6)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=30, what="it is cancelled")
        wait_for(
            lambda: read_offsets(name) == {0: 3}, timeout=30, what="the others are in"
        )
        fixed.set()
        wait_for(lambda: read_offsets(name) == {0: 6}, timeout=30, what="all is in")
    assert {fields["offset"] for _, fields in failed} == {3}
    assert "took longer than its timeout=1.5 s" in failed[0][1]["error"]
    assert read_seen() == [*range(6)]


@pytest.mark.guarantee("W78")
def test_an_async_handler_that_blocks_its_loop_is_reported_with_its_stack(
    make, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    app = make()
    go = threading.Event()

    @app.consumer(name, group=f"{name}-g", timeout=0.1)
    async def handle(record, conn) -> None:
        go.wait(60)

    produce(bootstrap_servers, name, [("k", 1)])
    with (
        heard("record.stuck") as stuck,
        heard("record.failed"),
        running(app, "consumers"),
    ):
        wait_for(lambda: stuck, timeout=30, what="it is reported")
        go.set()
        wait_for(lambda: read_offsets(name) == {0: 1}, timeout=30, what="it is in")
    assert "go.wait(60)" in stuck[0][1]["stack"]
