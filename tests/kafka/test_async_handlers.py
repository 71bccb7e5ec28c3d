"""Async handlers run to their end in the transaction that moves the offset."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import psycopg
import pytest

from tests.support.apps import heard, running
from tests.support.records import key_of, produce
from tests.support.waiting import linger


@pytest.mark.guarantee("K16")
def test_the_record_of_an_async_handler_counts_once_the_handler_has_ended(
    make, admin, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for
):
    name = topic(1)
    # However busy the machine is, all records are in one block.
    app = make(consumer_block_seconds=60.0)
    begun, go = threading.Event(), threading.Event()

    @app.consumer(name, group=f"{name}-g")
    async def handle(record, conn) -> None:
        await conn.execute(seen, (record.partition, record.value))
        if record.value == 3:
            begun.set()
            await asyncio.to_thread(go.wait, 60)
        await conn.execute(seen, (record.partition, record.value + 100))

    produce(bootstrap_servers, name, [("k", n) for n in range(6)])
    with running(app, "consumers"):
        assert begun.wait(30)
        # What it awaits takes its time, and neither effect nor offset is there.
        linger(0.5)
        assert read_seen() == []
        assert read_offsets(name) == {}
        go.set()
        wait_for(lambda: read_offsets(name) == {0: 6}, timeout=30, what="all is in")
    assert read_seen() == [n for k in range(6) for n in (k, k + 100)]
    rows = admin.execute(
        "select count(distinct xmin::text), count(*) from seen"
    ).fetchone()
    assert rows[1] == 12
    last = admin.execute("select xmin::text from seen where n = 105").fetchone()
    stored = admin.execute("select xmin::text from jobs_lib.offsets").fetchone()
    assert last == stored


@pytest.mark.guarantee("K16")
def test_async_handlers_share_a_loop_and_partitions_go_on_side_by_side(
    make, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(2)
    app = make()
    loops: set[asyncio.AbstractEventLoop] = set()
    waiting: set[int] = set()
    go = threading.Event()

    @app.consumer(name, group=f"{name}-g", per="block")
    async def handle(records, conn) -> None:
        loops.add(asyncio.get_running_loop())
        waiting.add(records[0].partition)
        await asyncio.to_thread(go.wait, 60)

    for partition in range(2):
        produce(bootstrap_servers, name, [(key_of(partition, 2), 1)])
    with running(app, "consumers"):
        wait_for(lambda: waiting == {0, 1}, timeout=30, what="both are awaited at once")
        go.set()
        wait_for(lambda: read_offsets(name) == {0: 1, 1: 1}, timeout=30, what="all is")
    (loop,) = loops
    wait_for(loop.is_closed, what="the loop has ended with the service")


@pytest.mark.guarantee("K16")
def test_a_job_that_an_async_handler_enqueues_has_the_records_origin(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(4)
    app = make(home=name)

    @app.job()
    def later(job) -> None: ...

    @app.consumer(name, group=f"{name}-g")
    async def handle(record, conn) -> None:
        await later.enqueue(conn)

    produce(bootstrap_servers, name, [(key_of(2, 4), 1)])
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {2: 1}, timeout=30, what="it is in")
    origins = admin.execute("select origin from jobs_lib.jobs").fetchall()
    assert origins == [(f"{name}/2",)]


async def roll_back(conn) -> None:
    await conn.rollback()


async def commit(conn) -> None:
    await conn.commit()


async def roll_back_by_sql(conn) -> None:
    await conn.execute("rollback")


async def swallow(conn) -> None:
    with contextlib.suppress(psycopg.Error):
        await conn.execute("select 1 / 0")


@pytest.mark.guarantee("FJ21")
@pytest.mark.parametrize("spoil", [roll_back, commit, roll_back_by_sql, swallow])
def test_no_effect_is_lost_where_an_async_handler_ends_or_breaks_the_transaction(
    make, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for, spoil
):
    name = topic(1)
    app = make()
    fixed = threading.Event()

    @app.consumer(name, group=f"{name}-g")
    async def handle(record, conn) -> None:
        await conn.execute(seen, (record.partition, record.value))
        if record.value == 5 and not fixed.is_set():
            await spoil(conn)

    produce(bootstrap_servers, name, [("k", n) for n in range(10)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: len(failed) > 1, timeout=30, what="the record is named")
        assert read_offsets(name) == {0: 5}
        assert read_seen() == [*range(5)]
        fixed.set()
        wait_for(lambda: read_offsets(name) == {0: 10}, timeout=30, what="all is in")
    assert {fields["offset"] for _, fields in failed} == {5}
    assert all("conn.transaction()" in fields["error"] for _, fields in failed)
    if spoil in (roll_back, commit):
        assert "in a handler: its transaction also" in failed[0][1]["error"]
    assert read_seen() == [*range(10)]


@pytest.mark.guarantee("FJ21")
def test_a_savepoint_undoes_what_an_async_handler_only_tries(
    make, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for
):
    name = topic(1)
    app = make()

    @app.consumer(name, group=f"{name}-g")
    async def handle(record, conn) -> None:
        # Often enough for the driver to prepare it.
        await conn.execute(seen, (record.partition, record.value))
        with contextlib.suppress(psycopg.Error):
            async with conn.transaction():
                await conn.execute(seen, (record.partition, -1))
                await conn.execute("select 1 / 0")

    produce(bootstrap_servers, name, [("k", n) for n in range(50)])
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 50}, timeout=30, what="all is in")
    assert read_seen() == [*range(50)]


@pytest.mark.guarantee("K16")
def test_plain_and_async_handlers_share_a_connections_prepared_statements(
    make, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for
):
    name = topic(1)
    app = make()

    @app.consumer(name, group=f"{name}-g", type="a", type_field="kind")
    async def handle_later(record, conn) -> None:
        await conn.execute(seen, (record.partition, record.value["n"]), prepare=True)

    @app.consumer(name, group=f"{name}-g", type="b", type_field="kind")
    def handle(record, conn) -> None:
        conn.execute(seen, (record.partition, record.value["n"]), prepare=True)
        conn.execute("select %s::int", (1,), prepare=True)

    values = [{"kind": "ab"[n % 2], "n": n} for n in range(20)]
    produce(bootstrap_servers, name, [("k", value) for value in values])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 20}, timeout=30, what="all is in")
    assert not failed
    assert read_seen() == [*range(20)]


@pytest.mark.guarantee("K16")
def test_what_an_async_handler_leaves_behind_writes_into_no_later_transaction(
    make, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for
):
    name = topic(1)
    app = make()
    left: list[asyncio.Task[Any]] = []
    go: list[asyncio.Event] = []

    @app.consumer(name, group=f"{name}-g")
    async def handle(record, conn) -> None:
        async def write_later() -> None:
            await go[0].wait()
            await conn.execute(seen, (record.partition, -1))

        if record.value == 0:
            go.append(asyncio.Event())
            left.append(asyncio.create_task(write_later()))
        else:
            go[0].set()
            await asyncio.wait(left)
        await conn.execute(seen, (record.partition, record.value))

    produce(bootstrap_servers, name, [("k", 0), ("k", 1)])
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 2}, timeout=30, what="all is in")
    assert read_seen() == [0, 1]
    assert "after its handler has ended" in str(left[0].exception())


@pytest.mark.guarantee("K16")
def test_a_statement_that_nobody_awaited_costs_the_record_and_nothing_else(
    make, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for
):
    name = topic(1)
    app = make()
    fixed = threading.Event()
    left: list[asyncio.Task[Any]] = []

    @app.consumer(name, group=f"{name}-g")
    async def handle(record, conn) -> None:
        await conn.execute(seen, (record.partition, record.value))
        if record.value == 3 and not fixed.is_set():
            left.append(asyncio.create_task(conn.execute("select pg_sleep(60)")))
            await asyncio.sleep(0.1)

    produce(bootstrap_servers, name, [("k", n) for n in range(6)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=30, what="it is named")
        fixed.set()
        wait_for(lambda: read_offsets(name) == {0: 6}, timeout=30, what="all is in")
    assert all(one.cancelled() for one in left)
    assert {fields["offset"] for _, fields in failed} == {3}
    assert read_seen() == [*range(6)]


@pytest.mark.guarantee("K16")
def test_an_async_handler_that_never_ends_does_not_keep_its_service_from_stopping(
    make, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    app = make(handover_timeout=0.2, shutdown_timeout=0.2)
    begun = threading.Event()
    cancelled = threading.Event()

    @app.consumer(name, group=f"{name}-g")
    async def handle(record, conn) -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    produce(bootstrap_servers, name, [("k", 1)])
    with heard("loop.failed") as failed:
        with running(app, "consumers"):
            assert begun.wait(30)
            started = time.monotonic()
        seconds = time.monotonic() - started
        assert cancelled.wait(30)
        # The service has left a thread behind, which finds that it is fenced.
        threads = f"consume {name}-g"
        wait_for(
            lambda: not any(threads in one.name for one in threading.enumerate()),
            timeout=30,
            what="nothing of the service goes on",
        )
    assert seconds < 30
    (told,) = [str(fields["error"]) for _, fields in failed]
    assert "let it go before its handler had ended" in told
    assert read_offsets(name) == {}


@pytest.mark.guarantee("K16")
def test_an_async_handler_that_wants_to_exit_fails_its_record_alone(
    make, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(2)
    app = make()
    fixed = threading.Event()

    async def leave() -> None:
        raise SystemExit(1)

    @app.consumer(name, group=f"{name}-g")
    async def handle(record, conn) -> None:
        if record.partition == 0 and not fixed.is_set():
            # In a task, which ends the loop, and in the handler itself.
            left = asyncio.create_task(leave())
            await asyncio.wait([left])
            # Without this, the task would log its error whenever it is collected.
            assert isinstance(left.exception(), SystemExit)
            raise SystemExit(2)

    produce(bootstrap_servers, name, [(key_of(0, 2), 1)])
    with (
        heard("record.failed") as failed,
        heard("thread.ended") as ended,
        running(app, "consumers"),
    ):
        wait_for(lambda: failed and ended, timeout=30, what="it is named")
        produce(bootstrap_servers, name, [(key_of(1, 2), 1)])
        wait_for(lambda: read_offsets(name) == {1: 1}, timeout=30, what="others go on")
        fixed.set()
        wait_for(lambda: read_offsets(name) == {0: 1, 1: 1}, timeout=30, what="all is")
    assert failed[0][1]["error"] == "SystemExit: 2"
