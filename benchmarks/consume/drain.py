"""How fast a topic becomes a table, and how dear."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicPartition

from benchmarks.consume import peers
from benchmarks.consume.service import OPEN_GROUP, takes_blocks
from benchmarks.consume.stage import ConsumerError, count_cpu
from benchmarks.consume.statements import INCOMING, MERGE, REMOVE
from benchmarks.consume.tables import HANDLED, READ_MODEL, find_difference
from benchmarks.consume.topics import make_states
from benchmarks.figures import ratio
from benchmarks.machine import read_usage
from benchmarks.ownership.pods import wait_until
from jobs_lib.kafka.client import make_consumer
from jobs_lib.kafka.places import find_places
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.bench import Bench, Figures, Rows
    from benchmarks.consume.peers import Peer
    from benchmarks.consume.stage import Stage
    from benchmarks.consume.tables import Table
    from benchmarks.consume.topics import Topic
    from benchmarks.worker import Row

RECORDS = 600_000
KEYS = 100_000
WAITING = 1_000_000
_LIMIT_BLOCK = 5_000
_SECONDS = 400.0
_EQUAL_SECONDS = 10.0


def measure_drain(bench: Bench, stage: Stage) -> Figures:
    """Fill a table from a waiting topic, beside others and PostgreSQL alone."""
    consumers = {peer.name: peer for peer in (peers.READ_MODEL, *stage.peers.values())}
    rows = bench.alternate(
        {
            **{
                name: partial(drain, bench, stage, peer, READ_MODEL)
                for name, peer in consumers.items()
            },
            "limit": partial(copy_and_merge, bench, stage),
        }
    )
    ours = rows["read_model"]
    speed = ours.median("records_s")
    return {
        "read_model_records_s": speed,
        **{
            f"read_model_vs_{name}": ratio(speed, rows[name].median("records_s"))
            for name in (*stage.peers, "limit")
        },
        "consumer_cpu_s_per_100k": ours.median("consumer_cpu"),
        "db_cpu_s_per_100k": ours.median("db_cpu"),
        "drains": {name: _summarize(rows[name]) for name in rows},
    }


def measure_handler(bench: Bench, stage: Stage) -> Figures:
    """Insert a row for each record, by handlers and by a loop."""
    consumers = [peers.HANDLER, peers.EXECUTE_LOOP, peers.INSERT_LOOP]
    if takes_blocks():
        consumers.append(peers.BLOCK_HANDLER)
    else:
        bench.tell('block_handler: left out, since consumers take no per="block"')
    rows = bench.alternate(
        {peer.name: partial(drain, bench, stage, peer, HANDLED) for peer in consumers}
    )
    loop = rows["insert_loop"].median("records_s")
    speeds = {
        name: rows[name].median("records_s") if name in rows else None
        for name in ("handler", "block_handler")
    }
    return {
        "handler_records_s": speeds["handler"],
        "handler_vs_batch_loop": ratio(speeds["handler"], loop),
        "handler_vs_execute_loop": ratio(
            speeds["handler"], rows["execute_loop"].median("records_s")
        ),
        "block_handler_vs_batch_loop": ratio(speeds["block_handler"], loop),
        "handlers": {name: _summarize(rows[name]) for name in rows},
    }


def measure_gate(bench: Bench, stage: Stage) -> Figures:
    """Insert a row for each record, with a gate that is open, and without one."""

    def open_gate(topic: Topic) -> None:
        servers = stage.broker.bootstrap_servers
        settings = load_settings(kafka_bootstrap_servers=servers)
        # An offset above an end would close the gate.
        ends = find_places(settings, topic.name, "end")
        consumer = make_consumer(settings, OPEN_GROUP)
        places = [TopicPartition(topic.name, *one) for one in ends.items()]
        consumer.commit(offsets=places, asynchronous=False)
        consumer.close()

    rows = bench.alternate(
        {
            peer.name: partial(drain, bench, stage, peer, HANDLED, prepare=open_gate)
            for peer in (peers.HANDLER, peers.GATED_HANDLER)
        }
    )
    speeds = {name: rows[name].median("records_s") for name in rows}
    return {
        "gated_handler_records_s": speeds["gated_handler"],
        "gate_open_vs_none": ratio(speeds["gated_handler"], speeds["handler"]),
    }


def measure_memory(bench: Bench, stage: Stage) -> Figures:
    """The memory of a read model's process while many records wait."""
    waiting = partial(
        drain, bench, stage, peers.READ_MODEL, READ_MODEL, records=WAITING
    )
    row = bench.attempt("memory", waiting) or {}
    return {"rss_mb": row.get("rss_mb")}


def drain(
    bench: Bench,
    stage: Stage,
    peer: Peer,
    table: Table,
    *,
    records: int = RECORDS,
    prepare: Callable[[Topic], None] = lambda topic: None,
) -> Row:
    """Records a second, from the first row that can be read until the last one.

    Records of which the first look finds the rows are not counted: a consumer of large
    blocks has more of them.

    Raises:
        ConsumerError: the table is not equal to the topic in the end.
    """
    share = peer.drain_share
    topic = stage.topics.fill(
        int(bench.size(records) * share), int(bench.size(KEYS) * share)
    )
    prepare(topic)
    with (
        stage.prepared(table) as connection,
        stage.consuming(peer, topic) as running,
    ):
        stage.await_first(running, connection, table)
        before, done = stage.look(running), table.count(connection)
        stage.await_progress(
            running, connection, table, topic, seconds=_SECONDS, pause=0.02
        )
        used = stage.look(running) - before
        rss = running.rss_mb
        equal = partial(find_difference, connection, table, topic, deletes=peer.deletes)
        wait_until(
            lambda: equal() is None,
            _EQUAL_SECONDS,
            lambda: f"{peer.name} is equal to the topic: {equal()}",
            pause=0.2,
        )
    count = topic.records - done
    if count <= 0:
        raise ConsumerError(f"{peer.name} had all {topic.records} at the first look")
    return {"records_s": count / used.at, "rss_mb": rss, **count_cpu(used, count)}


def copy_and_merge(bench: Bench, stage: Stage) -> Row:
    """PostgreSQL alone: the same records, ready as text, by COPY and one merge a block.

    Raises:
        ConsumerError: the table is not equal to the topic in the end.
    """
    records, keys = bench.size(RECORDS), bench.size(KEYS)
    topic = stage.topics.fill(records, keys)
    blocks = _make_blocks(records, keys)
    pid = bench.server.pid
    with stage.prepared(READ_MODEL) as connection:
        connection.execute(INCOMING)
        before, began = read_usage(None, pid), time.monotonic()
        for lines, gone in blocks:
            with connection.transaction(), connection.cursor() as cursor:
                with cursor.copy("copy incoming from stdin") as copy:
                    copy.write(lines)
                cursor.execute(MERGE, prepare=True)
                if gone:
                    cursor.execute(REMOVE, (gone,))
        took, used = time.monotonic() - began, read_usage(None, pid) - before
        if difference := find_difference(connection, READ_MODEL, topic):
            raise ConsumerError(f"the limit is not equal to the topic: {difference}")
    return {
        "records_s": topic.records / took,
        "db_cpu": used.server * 100_000 / topic.records,
    }


def _make_blocks(records: int, keys: int) -> list[tuple[str, list[str]]]:
    """The newest states of each block as lines for COPY, and the keys that are gone."""
    blocks = []
    states = list(make_states(records, keys))
    for first in range(0, len(states), _LIMIT_BLOCK):
        newest = {state.key: state for state in states[first : first + _LIMIT_BLOCK]}
        lines = "".join(
            f"{key}\t{airport}\t{flights}\t{late}\t{version}\n"
            for key, state in newest.items()
            if not state.gone
            for airport, flights, late, version in (state.row,)
        )
        blocks.append((lines, [key for key, state in newest.items() if state.gone]))
    return blocks


def _summarize(rows: Rows) -> dict[str, Any]:
    figures = ("records_s", "consumer_cpu", "db_cpu", "broker_cpu", "rss_mb", "idle")
    found = {name: rows.median(name) for name in figures}
    return {name: value for name, value in found.items() if value is not None}
