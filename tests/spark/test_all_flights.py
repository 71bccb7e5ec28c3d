"""All flights are re-exported on a cluster, whatever is killed on the way."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from examples.flights.flights import read_flights
from jobs_lib import capture_changes, reexport
from jobs_lib.testing.databases import Databases, embedded_server
from tests.spark.fleet import ROOT, SLOW, spark_options
from tests.spark.runs import Run, await_live
from tests.support.apps import make_app
from tests.support.beside import beside
from tests.support.brokers import start_own_broker
from tests.support.processes.relays import flights as declare_flights
from tests.support.records import produce, read_topic
from tests.support.spark_cluster import SETTINGS, SparkCluster
from tests.support.verdict import judge
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

FLIGHTS = 336_776
ORPHANS = range(1_000_001, 1_001_001)
RATE = 60_000
"""Six minutes for all flights, if nothing is killed."""
STALE_RATE = 1_000
RANGES = 337
LOADING = ("driver", "worker")
KILLS = {"driver": 6, "worker": 6, "pod": 8, "broker": 4, "database": 4}
LATE_KILLS = ("pod", "broker", "database")
"""Beside another one of the driver, while the orphans are removed."""
SEED = random.randrange(1_000)
_AHEAD = 60_000
# It loads a minute ahead and not all at once, so it goes on nearly to the end.
_COMMAND = f"""
from functools import partial
from jobs_lib.cli import reexport
from jobs_lib.cli.main import main

reexport.start_reexport = partial(reexport.start_reexport, ahead={_AHEAD})
main()
"""
_TABLES = """
create table flights (id int primary key, version bigint not null, delay int);
create table aircraft (tail text primary key, version bigint not null);
"""
_TOPIC = {
    "cleanup.policy": "compact",
    "message.timestamp.type": "LogAppendTime",
    # The judge sees every record.
    "min.compaction.lag.ms": "86400000",
}
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(7_200)]


@dataclass
class Stage:
    """The servers, and a run on them that has not begun."""

    run: Run
    topic: str
    second: str
    app: Any


@pytest.fixture
def stage(
    run_process: Callable[..., Any], start_process: Callable[..., Any], tmp_path: Any
) -> Iterator[Stage]:
    """A database with all flights, a broker, and a cluster of two workers."""
    print(f"seed {SEED}")
    (tmp_path / "spark").mkdir()
    conf = {**SETTINGS, "spark.executorEnv.PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        server = stack.enter_context(embedded_server())
        databases = stack.enter_context(Databases(server.url))
        url = stack.enter_context(databases.fresh())
        broker = stack.enter_context(start_own_broker())
        cluster = stack.enter_context(SparkCluster(tmp_path / "spark", conf))
        topics = {
            "topic": broker.create(8, _TOPIC),
            "second": broker.create(4, _TOPIC),
        }
        app = make_app(url, kafka_bootstrap_servers=broker.bootstrap_servers)
        declare_flights(app, **topics)
        run = Run(
            *(cluster, server, broker, url, run_process, start_process, tmp_path),
            random.Random(SEED),
            kind="flights",
            topics=topics,
            entity="flights",
            program=("-c", _COMMAND),
        )
        yield Stage(run, **topics, app=app)


def fill(stage: Stage) -> None:
    """Fill the tables, plant the orphans, and begin the second re-export: paused."""
    database = stage.app.database()
    flights = read_flights()
    assert len(flights) == FLIGHTS
    with psycopg.connect(database.url) as connection:
        connection.execute(_TABLES)
        with connection.cursor().copy("copy flights from stdin") as copy:
            for flight in flights:
                copy.write_row((flight.id, 1, flight.delay))
        tails = sorted({flight.tail for flight in flights if flight.tail})
        with connection.cursor().copy("copy aircraft from stdin") as copy:
            for tail in tails:
                copy.write_row((tail, 1))
        capture_changes(connection, "flights", topic=stage.topic, key="id")
    produce(
        stage.run.broker.bootstrap_servers,
        stage.topic,
        [(str(key), {"version": 1}) for key in ORPHANS],
        headers={"ce_version": "1"},
    )
    reexport.start(database, stage.app.entities["aircraft"], rate=RATE)
    reexport.pause(database, "aircraft")
    with psycopg.connect(database.url) as connection:
        connection.execute(SLOW)


def edit(url: str, stop: threading.Event) -> None:
    """Change flights, and now and then delete one, as long as there is a database."""
    while not stop.wait(0.2):
        try:
            with psycopg.connect(url, autocommit=True) as connection:
                while not stop.wait(0.1):
                    keys = random.sample(range(1, FLIGHTS + 1), 10)
                    connection.execute(
                        "update flights set version = version + 1, delay = 7"
                        " where id = any (%s)",
                        (keys,),
                    )
                    connection.execute("delete from flights where id = %s", keys[:1])
        except psycopg.OperationalError:
            continue  # it was killed


def choose_kills(chance: random.Random) -> list[tuple[int, str]]:
    """Choose what is killed when so many records are sent."""
    kills = []
    for what, times in KILLS.items():
        # When all is loaded, there is neither driver nor task.
        last = FLIGHTS - (2 * _AHEAD if what in LOADING else 10_000)
        kills += [(chance.randrange(1_000, last), what) for _ in range(times)]
    return sorted(kills)


def send_all(run: Run) -> None:
    """Re-export all flights, and kill whatever there is meanwhile."""
    run.drive(
        *("start", "flights", "--rate", str(RATE), "--ranges", str(RANGES)),
        *spark_options(run.cluster.master),
    )
    run.start_pods()
    for sent, what in choose_kills(run.chance):
        run.reach_sent(sent)
        if what in LOADING:
            run.reach("the driver is back", lambda _: run.is_driving)
        run.kill(what)
    run.reach("all are sent", lambda p: p.state == "finished")


def remove_orphans(run: Run) -> list[int]:
    """Remove them, beside more kills; return two that are born meanwhile."""
    stale = ("stale", "flights", "--rate", str(STALE_RATE))
    run.drive(*stale, "--master", run.cluster.master)
    wait_for(
        lambda: (run.cluster.read() or {}).get("activeapps"),
        timeout=600,
        what=lambda: f"the driver has a Spark\n{run.driver and run.driver.output}",
    )
    run.kill("driver")
    run.reach("some are gone", lambda p: p.stale and p.sent >= 100)
    reexport.pause(run.database, run.entity)
    born = bear(run)
    reexport.resume(run.database, run.entity)
    for sent, what in zip(
        sorted(run.chance.sample(range(150, 950), len(LATE_KILLS))),
        run.chance.sample(LATE_KILLS, len(LATE_KILLS)),
        strict=True,
    ):
        run.reach_sent(sent)
        run.kill(what)
    run.reach("all are gone", lambda p: p.stale and p.state == "finished")
    return born


def bear(run: Run) -> list[int]:
    """Insert two flights with keys whose records wait; the change of one is sent."""
    with psycopg.connect(run.url) as connection:
        waiting = connection.execute(
            "select k::int from jobs_lib.jobs,"
            " jsonb_array_elements_text(payload->'keys') k"
            " where type = 'jobs_lib.reexport.stale' order by 1"
        ).fetchall()
        (silent,), (loud,) = run.chance.sample(waiting, 2)
        insert = "insert into flights values (%s, 2, 0)"
        connection.execute(insert, (loud,))
        connection.execute("set local session_replication_role = replica")
        connection.execute(insert, (silent,))
    return [silent, loud]


@pytest.mark.guarantee("X12", "X10", "I33", "I34")
@pytest.mark.expects("loop.failed", "fenced")
def test_all_flights_arrive_in_order_at_the_rate_beside_edits_and_thirty_kills(stage):
    run, servers = stage.run, stage.run.broker.bootstrap_servers
    fill(stage)
    with beside(lambda stop: edit(run.url, stop)):
        send_all(run)
        first = reexport.status(run.database, "flights")
        born = remove_orphans(run)
        last = reexport.status(run.database, "flights")
    await_live(run.url)
    # The other one has waited all the time.
    assert reexport.status(run.database, "aircraft").sent == 0
    assert read_topic(servers, stage.second) == []
    reexport.resume(run.database, "aircraft")
    run.entity = "aircraft"
    run.reach("the paused one ends", lambda p: p.state == "finished")

    with psycopg.connect(run.url) as connection:
        rows = connection.execute("select id::text, version from flights").fetchall()
        tails = connection.execute("select tail, version from aircraft").fetchall()
    assert {str(key) for key in born} < {key for key, _ in rows}
    found = judge(read_topic(servers, stage.topic, timeout=900), dict(rows))
    assert (found.missing, found.alive) == ([], [])
    assert (found.backwards, found.scattered) == ([], [])
    sent = [found.sent[str(one.id)] for one in (first, last)]
    print(f"{sent}, {len(run.killed)} kills, {last.total} orphans")
    assert sent[0].fullest <= RATE
    assert sent[1].fullest <= STALE_RATE
    assert sent[0].repeated < 0.05 * FLIGHTS
    assert sent[1].repeated < 0.05 * len(ORPHANS)
    assert last.total == len(ORPHANS)
    assert len(run.killed) >= 30
    other = judge(read_topic(servers, stage.second), dict(tails))
    assert (other.missing, other.alive, other.backwards) == ([], [], [])
