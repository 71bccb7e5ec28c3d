"""The measures of the relay."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import psycopg

from benchmarks.figures import percentile, ratio
from benchmarks.machine import read_usage
from benchmarks.relay.debezium.connect import connecting
from benchmarks.relay.stage import staged
from jobs_lib import App
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.relay.stage import Stage
    from benchmarks.worker import Row
    from jobs_lib.devstack import KafkaBroker

_COLUMNS = "o.id, o.topic, o.key, o.value, o.headers, o.version, o.created_at"
_CLAIM = f"""
delete from jobs_lib.outbox o using (
    select shard, class, id from jobs_lib.outbox order by shard, class, id limit 5000
    for update skip locked
) c where (o.shard, o.class, o.id) = (c.shard, c.class, c.id) returning {_COLUMNS}
"""
_CLAIM_BY_CTID = f"""
delete from jobs_lib.outbox o where ctid = any (array(
    select ctid from jobs_lib.outbox order by shard, class, id limit 5000
    for update skip locked
)) returning {_COLUMNS}
"""
_CATCH_UP_INFLOW = 1_000
_ROWS_OF_A_TRANSACTION = 100
_COMPUTING = ("relay", "db", "broker")


def measure_rows(bench: Bench, broker: KafkaBroker) -> Figures:
    """Relay a backlog; also claim and delete it by statements alone."""
    rows = bench.alternate(
        {
            "relay": partial(relay, bench, broker),
            "debezium": partial(debezium, bench, broker),
            "idempotent": partial(relay, bench, broker, idempotent=True),
            "two": partial(relay, bench, broker, processes=2),
            "bare": partial(bare, bench, broker),
            "claim_delete": partial(claim_delete, bench, broker, _CLAIM),
            "by_ctid": partial(claim_delete, bench, broker, _CLAIM_BY_CTID),
        }
    )
    ours = rows["relay"].median("rows_s")
    return {
        "relay_rows_s": ours,
        "debezium_rows_s": rows["debezium"].median("rows_s"),
        "relay_vs_debezium": ratio(ours, rows["debezium"].median("rows_s")),
        "two_vs_debezium": ratio(
            rows["two"].median("rows_s"), rows["debezium"].median("rows_s")
        ),
        "relay_vs_claim_delete": ratio(ours, rows["claim_delete"].median("rows_s")),
        "relay_vs_claim_delete_by_ctid": ratio(ours, rows["by_ctid"].median("rows_s")),
        "transactional_vs_idempotent": ratio(ours, rows["idempotent"].median("rows_s")),
        "relay_vs_bare": ratio(ours, rows["bare"].median("rows_s")),
        "bare_vs_debezium": ratio(
            rows["bare"].median("rows_s"), rows["debezium"].median("rows_s")
        ),
        "rss_mb": rows["relay"].median("rss_mb"),
        "two_rss_mb": rows["two"].median("rss_mb"),
        "debezium_rss_mb": rows["debezium"].median("rss_mb"),
        **{
            f"{name}_cpu_s_per_100k": {
                who: rows[name].median(f"{who}_cpu") for who in _COMPUTING
            }
            for name in ("relay", "two", "debezium", "bare")
        },
        "idle_cores": {
            name: rows[name].median("idle")
            for name in ("relay", "two", "debezium", "bare")
        },
    }


def relay(
    bench: Bench, broker: KafkaBroker, *, idempotent: bool = False, processes: int = 1
) -> Row:
    """The row of a warm relay."""
    with (
        staged(bench.server, broker) as stage,
        stage.relaying(idempotent=idempotent, processes=processes) as relaying,
    ):
        row = _relay_rows(bench, stage, relaying.pid, warm_up=5_000)
        return {**row, "rss_mb": relaying.rss_mb}


def debezium(bench: Bench, broker: KafkaBroker) -> Row:
    """The row of a warm Debezium; its rows stay in the table."""
    with staged(bench.server, broker) as stage, connecting(stage) as connect:
        # The compiler of Java needs to see more records first; our relay has no
        # compiler.
        row = _relay_rows(bench, stage, connect.pid, warm_up=bench.size(500_000))
        return {**row, "rss_mb": connect.rss_mb}


def bare(bench: Bench, broker: KafkaBroker) -> Row:
    """The row of the least that a relay in Python does."""
    with staged(bench.server, broker) as stage, stage.relaying_barely() as relaying:
        return _relay_rows(bench, stage, relaying.pid, warm_up=5_000)


def _relay_rows(bench: Bench, stage: Stage, pid: int, *, warm_up: int) -> Row:
    """Rows a second, from their commit until the last can be read, and the CPU used."""
    count = bench.size(200_000)
    look = partial(read_usage, pid, bench.server.pid)
    with bench.server.connect() as connection:
        stage.fill(connection, warm_up)
        stage.await_rest(warm_up, 300, look)
        committed = stage.fill(connection, count)
        before = look()
        came, after = stage.await_rest(warm_up + count, 300, look)
    took, used = came - committed, after - before
    per_100k = 100_000 / count
    return {
        "rows_s": count / took,
        "relay_cpu": used.worker * per_100k,
        "db_cpu": used.server * per_100k,
        # Nothing else runs on the machine.
        "broker_cpu": used.other * per_100k,
        "idle": 1 - used.machine / took / (os.cpu_count() or 1),
    }


def claim_delete(bench: Bench, broker: KafkaBroker, claim: str) -> Row:
    """Claim and delete the same rows by one statement, with all that records need."""
    count = bench.size(200_000)
    with staged(bench.server, broker) as stage, bench.server.connect() as connection:
        stage.fill(connection, count)
        began = time.monotonic()
        while connection.execute(claim.encode(), binary=True).fetchall():
            pass
        return {"rows_s": count / (time.monotonic() - began)}


def measure_holds(bench: Bench, broker: KafkaBroker) -> Figures:
    """Measure the cost of 100,000 held keys of the topic to good rows."""
    rows = bench.alternate(
        {
            "free": partial(relay_beside, bench, broker, 0),
            "held": partial(relay_beside, bench, broker, 100_000),
        }
    )
    free, held = (rows[name].median("rows_s") for name in ("free", "held"))
    return {"held_keys_x": ratio(free, held), "held_keys_rows_s": held}


def relay_beside(bench: Bench, broker: KafkaBroker, holds: int) -> Row:
    """Rows a second of a warm relay while this many keys are held."""
    with staged(bench.server, broker) as stage:
        with bench.server.connect() as connection:
            stage.hold(connection, holds)
        with stage.relaying() as relaying:
            row = _relay_rows(bench, stage, relaying.pid, warm_up=5_000)
        if (left := stage.count_holds()) != holds:
            raise RuntimeError(f"{left} of {holds} keys are held at the end")
        return row


def measure_idle(bench: Bench, broker: KafkaBroker) -> Figures:
    """Measure from a caller's commit to the consumer, while nothing else happens."""
    rows = bench.alternate(
        {
            "idle": partial(idle, bench, broker),
            "idle debezium": partial(idle_debezium, bench, broker),
            "idle idempotent": partial(idle, bench, broker, idempotent=True),
        }
    )
    ours = rows["idle"].median("p50_ms")
    return {
        "idle_p50_ms": ours,
        "idle_p99_ms": rows["idle"].median("p99_ms"),
        "idle_debezium_p50_ms": rows["idle debezium"].median("p50_ms"),
        "idle_vs_debezium": ratio(ours, rows["idle debezium"].median("p50_ms")),
        "idle_idempotent_p50_ms": rows["idle idempotent"].median("p50_ms"),
    }


def idle(bench: Bench, broker: KafkaBroker, *, idempotent: bool = False) -> Row:
    """The latency of the relay."""
    with (
        staged(bench.server, broker) as stage,
        stage.relaying(idempotent=idempotent),
    ):
        return _send_singly(bench, stage)


def idle_debezium(bench: Bench, broker: KafkaBroker) -> Row:
    """The latency of Debezium."""
    with staged(bench.server, broker) as stage, connecting(stage):
        return _send_singly(bench, stage)


def _send_singly(bench: Bench, stage: Stage) -> Row:
    """Write rows by ``send``, one at a time, once the relay is warm."""
    waits = []
    warm_up = bench.size(200, quick=50)
    with (
        stage.consuming() as consuming,
        psycopg.connect(bench.server.url) as connection,
    ):
        events = _app(bench).topic(stage.topic, value=bytes)
        for n in range(warm_up + bench.size(300, quick=50)):
            events.send(connection, key=f"key-{n}", value=b"x" * 300)
            connection.commit()
            committed = time.monotonic()
            waits.append(1_000 * (consuming.await_one() - committed))
            time.sleep(0.01 + n % 20 / 1_000)
    del waits[:warm_up]
    return {"p50_ms": percentile(waits, 0.5), "p99_ms": percentile(waits, 0.99)}


def measure_order(bench: Bench, broker: KafkaBroker) -> Figures:
    """Measure the cost of the key's lock to writers."""
    rows = bench.alternate(
        {
            "ordered": partial(write, bench, broker, ordered=True),
            "unordered": partial(write, bench, broker, ordered=False),
        }
    )
    return {
        "relay_ordered_cost": ratio(
            rows["ordered"].median("rows_s"), rows["unordered"].median("rows_s")
        )
    }


def write(bench: Bench, broker: KafkaBroker, *, ordered: bool) -> Row:
    """Write rows on one connection, some in each transaction: the disk waits, too."""
    count = bench.size(20_000)
    with (
        staged(bench.server, broker) as stage,
        psycopg.connect(bench.server.url) as connection,
    ):
        events = _app(bench).topic(stage.topic, value=bytes)
        began = time.monotonic()
        for n in range(count):
            # A row without a key has no order to keep.
            key = f"key-{n}" if ordered else None
            events.send(connection, key=key, value=b"x" * 300)
            if n % _ROWS_OF_A_TRANSACTION == 0:
                connection.commit()
        connection.commit()
        return {"rows_s": count / (time.monotonic() - began)}


def measure_outage(bench: Bench, broker: KafkaBroker) -> Figures:
    """Relay the backlog of an outage while the service continues to write."""
    row = bench.attempt("catch-up", partial(catch_up, bench, broker)) or {}
    return {"after_outage_catchup_x": row.get("x"), "rss_mb_backlog": row.get("rss_mb")}


def catch_up(bench: Bench, broker: KafkaBroker) -> Row:
    """How many times faster rows leave than they arrive."""
    count = bench.size(1_000_000, quick=50_000)
    stop = threading.Event()
    written = 0
    with contextlib.ExitStack() as opened:
        stage = opened.enter_context(staged(bench.server, broker))
        connection = opened.enter_context(bench.server.connect())
        stage.fill(connection, count)

        def write() -> None:
            nonlocal written
            with bench.server.connect() as other:
                due = time.monotonic()
                while not stop.wait(max(0.0, due - time.monotonic())):
                    stage.fill(other, _CATCH_UP_INFLOW // 20)
                    written += _CATCH_UP_INFLOW // 20
                    due += 0.05

        consuming = opened.enter_context(stage.consuming())
        thread = threading.Thread(target=write)
        thread.start()
        try:
            relaying = opened.enter_context(stage.relaying())
            consuming.await_records(1, 60)
            began = time.monotonic()
            ended = consuming.await_records(count, 600)
        finally:
            stop.set()
            thread.join()
        return {
            "x": count / (ended - began) / _CATCH_UP_INFLOW,
            "written": written,
            "rss_mb": relaying.rss_mb,
        }


def _app(bench: Bench) -> App:
    return App("bench", settings=load_settings(database_url=bench.server.url))


MEASURES = {
    "rows": measure_rows,
    "holds": measure_holds,
    "idle": measure_idle,
    "order": measure_order,
    "outage": measure_outage,
}
