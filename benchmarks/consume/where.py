"""How soon it is known where a change is, beside a long topic and a full outbox."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.consume.stage import ConsumerError
from benchmarks.consume.tables import READ_MODEL
from benchmarks.consume.topics import PARTITIONS, State, produce
from benchmarks.figures import percentile
from benchmarks.peers.peer import REPOSITORY
from jobs_lib import App
from jobs_lib.operating.where import where
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.consume.stage import Stage
    from benchmarks.consume.tables import Connection
    from benchmarks.consume.topics import Topic
    from benchmarks.worker import Row

ROWS = 1_000_000
RECORDS = 10_000_000
KEYS = 1_000_000
_ASKED = 200
_COMMANDS = 10
_TABLES = """
create table aircraft (tail text primary key, version bigint);
insert into aircraft
select 'N' || lpad(n::text, 6, '0'), 1 from generate_series(0, {keys} - 1) n;
insert into aircraft_rm (tail, version) select tail, version from aircraft
"""
_OUTBOX = """
insert into jobs_lib.outbox (shard, topic, key, value, version)
select jobs_lib.place_record(%(topic)s, key), %(topic)s, key,
    convert_to(repeat('x', 260), 'UTF8'), 2
from (
    select 'N' || lpad((n %% %(keys)s)::text, 6, '0') as key
    from generate_series(1, %(rows)s) n
) rows
"""
_OFFSETS = """
insert into jobs_lib.offsets (consumer_group, topic, partition, next_offset)
select 'bench', %(topic)s, n, %(records)s from generate_series(0, %(last)s) n
"""


def measure_where(bench: Bench, stage: Stage) -> Figures:
    """Ask where changes are: of keys that wait in the outbox, and of others."""
    keys, records = bench.size(KEYS), bench.size(RECORDS)
    topic = _fill_topic(stage, records, keys)
    with stage.prepared(READ_MODEL) as connection:
        _fill_tables(connection, topic, keys, bench.size(ROWS), records)
        app = _make_app(bench.server.url, stage.broker.bootstrap_servers, topic.name)
        rows = bench.alternate({"where": partial(_ask_all, app, topic.name, keys)})
        commands = bench.alternate(
            {"command": partial(_call_all, bench, stage, topic.name, keys)}, rounds=1
        )
    asked = rows["where"]
    return {
        "where_ms": asked.median("p95_ms"),
        "where_p50_ms": asked.median("p50_ms"),
        "where_found": asked.median("found"),
        "where_command_p50_ms": commands["command"].median("p50_ms"),
    }


def _fill_topic(stage: Stage, records: int, keys: int) -> Topic:
    """A topic with a state of a random key in each record."""
    topic = stage.topics.make()
    producer = stage.topics.open_producer(**{"queue.buffering.max.messages": 500_000})
    rng = random.Random(7)
    for number in range(records):
        state = State(f"N{rng.randrange(keys):06}", 1, number % 1_000)
        produce(producer, topic.name, state, state.value)
    if left := producer.flush(120):
        raise ConsumerError(f"{left} records of {topic.name} were not acknowledged")
    return topic


def _fill_tables(
    connection: Connection, topic: Topic, keys: int, rows: int, records: int
) -> None:
    connection.execute(_TABLES.format(keys=keys).encode())
    # Half of the keys wait.
    given = {"topic": topic.name, "keys": max(1, keys // 2), "rows": rows}
    connection.execute(_OUTBOX, given)
    place = {"topic": topic.name, "records": records, "last": PARTITIONS - 1}
    connection.execute(_OFFSETS, place)
    connection.execute("vacuum analyze")
    connection.execute("checkpoint")


def _make_app(url: str, broker: str, topic: str) -> App:
    app = App(
        "bench",
        settings=load_settings(database_url=url, kafka_bootstrap_servers=broker),
    )
    states = app.topic(topic, value=dict, compacted=True, partitions=PARTITIONS)

    @app.entity(states, source="aircraft", key="tail")
    def load(conn: Any, keys: list[str]) -> dict[str, Any]:
        return {}

    @app.read_model(topic, table="aircraft_rm", key="tail", group="bench")
    def aircraft_rm(record: Any) -> dict[str, Any]:
        return {}

    return app


def _ask_all(app: App, topic: str, keys: int) -> Row:
    """Ask of random keys, one after the other; each asks with new connections."""
    rng = random.Random(11)
    waits, found = [], 0
    for _ in range(_ASKED):
        key = f"N{rng.randrange(keys):06}"
        began = time.perf_counter()
        answer = where(app, topic, key)
        waits.append(1_000 * (time.perf_counter() - began))
        (place,) = [one for one in answer.places if one.place.startswith("topic")]
        found += place.version is not None
        outbox = next(one for one in answer.places if one.place == "outbox")
        if (outbox.state == "stuck") != (int(key[1:]) < max(1, keys // 2)):
            raise ConsumerError(f"the answer for {key} is wrong: {answer}")
    return {
        "p50_ms": percentile(waits, 0.5),
        "p95_ms": percentile(waits, 0.95),
        "found": found / _ASKED,
    }


def _call_all(bench: Bench, stage: Stage, topic: str, keys: int) -> Row:
    """The same by the command, which also loads the library."""
    rng, waits = random.Random(13), []
    environment = {
        **bench.server.environment,
        "BENCH_TOPIC": topic,
        "BENCH_GROUP": "bench",
        "JOBS_LIB_DATABASE_URL": bench.server.url,
        "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": stage.broker.bootstrap_servers,
        "PYTHONPATH": str(REPOSITORY),
    }
    command = [sys.executable, "-m", "jobs_lib.cli", "where"]
    for _ in range(_COMMANDS):
        key = f"N{rng.randrange(keys):06}"
        began = time.perf_counter()
        done = subprocess.run(
            [*command, "benchmarks.consume.service:app", topic, key],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            check=False,
        )
        waits.append(1_000 * (time.perf_counter() - began))
        if done.returncode not in (0, 1):
            raise ConsumerError(f"`jobs-lib where` fails: {done.stderr.decode()}")
    return {"p50_ms": percentile(waits, 0.5)}
