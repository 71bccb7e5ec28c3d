"""Whatever is killed while a re-export loads and sends, every key arrives in order."""

from __future__ import annotations

import random

import psycopg
import pytest

from jobs_lib.testing.databases import Databases, embedded_server
from tests.spark.fleet import SLOW, spark_options
from tests.spark.runs import Run, await_live
from tests.support.brokers import start_own_broker
from tests.support.records import read_topic
from tests.support.spark_cluster import SparkCluster
from tests.support.verdict import judge

KEYS = 20_000
RANGES = 100
RATE = 12_000
EDITS = 50
"""Live changes before each kill."""
SEED = random.randrange(1_000)
LOADING = ("driver", "worker")
SENDING = ("pod", "broker", "database")
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(3_000)]


def edit(run: Run) -> None:
    """Change some rows, as the service would; their states leave live."""
    keys = run.chance.sample(range(1, KEYS + 1), EDITS)
    with psycopg.connect(run.url) as connection:
        connection.execute(
            "update items set version = version + 1 where id = any (%s)", (keys,)
        )
        connection.execute(
            "select jobs_lib.send_current(%s, key::text, 'items', null::bigint)"
            " from unnest(%s::int[]) key",
            (run.topics["topic"], sorted(keys)),
        )


@pytest.mark.guarantee("X12", "W32", "I34", "X11")
@pytest.mark.expects("loop.failed", "fenced")
def test_kills_at_random_cost_no_key_and_few_repeats(
    run_process, start_process, tmp_path
):
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    folder = tmp_path / "spark"
    folder.mkdir()
    with (
        embedded_server() as server,
        Databases(server.url) as databases,
        databases.fresh() as url,
        start_own_broker() as broker,
        SparkCluster(folder) as cluster,
    ):
        with psycopg.connect(url) as connection:
            connection.execute(
                "create table items (id int primary key, name text, version bigint)"
            )
            connection.execute(
                "insert into items select g, 'item', 1 from generate_series(1, %s) g",
                (KEYS,),
            )
            connection.execute(SLOW)
        topic = broker.create(4, {"cleanup.policy": "compact"})
        run = Run(
            *(cluster, server, broker, url, run_process, start_process, tmp_path),
            chance,
            kind="reexport",
            topics={"topic": topic},
            entity="items",
        )
        run.drive(
            *("start", "items", "--rate", str(RATE), "--ranges", str(RANGES)),
            *spark_options(cluster.master),
        )
        run.start_pods()
        kills = [
            *chance.sample(LOADING, len(LOADING)),
            *chance.sample(SENDING, len(SENDING)),
            "pod",
        ]
        for number, what in enumerate(kills):
            if what in LOADING:
                run.reach_loaded(10 + 30 * number + chance.randrange(20))
            else:
                wanted = 3_000 * number + chance.randrange(2_000)
                run.reach_sent(min(KEYS - 1_000, wanted))
            edit(run)
            run.kill(what)
        run.reach("the end", lambda p: p.state == "finished")
        await_live(url)
        with psycopg.connect(url) as connection:
            rows = connection.execute("select id::text, version from items").fetchall()
        records = read_topic(broker.bootstrap_servers, topic, timeout=120)
    found = judge(records, dict(rows))
    (sent,) = found.sent.values()
    print(f"{sent}, {len(records)} records")
    assert (found.missing, found.alive, found.backwards) == ([], [], [])
    assert sent.repeated < 0.05 * KEYS
    assert len(records) < 1.05 * KEYS + EDITS * len(kills)
