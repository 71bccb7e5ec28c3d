"""Whatever is killed while a re-export loads and sends, every key arrives in order."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import psycopg
import pytest

from jobs_lib import reexport
from jobs_lib.errors import ReexportError, UnavailableError
from jobs_lib.postgres.database import Database
from jobs_lib.testing.databases import Databases, embedded_server
from tests.spark.fleet import SLOW, spark_options
from tests.support.brokers import own_broker
from tests.support.records import read_topic
from tests.support.spark_cluster import SparkCluster
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = 20_000
RANGES = 100
RATE = 12_000
EDITS = 50
"""Live changes before each kill."""
SEED = random.randrange(1_000)
_SERVICE = """
from jobs_lib import App
from tests.support.processes.relays import reexport

app = App("items")
reexport(app, topic="{topic}")
"""
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(3_000)]


class Run:
    """A re-export, all processes that take part in it, and a kill for each."""

    def __init__(self, cluster, server, broker, url, run, start_process, folder):
        self.cluster, self.server, self.broker = cluster, server, broker
        self.database = Database(url)
        self.topic = broker.create(4, {"cleanup.policy": "compact"})
        self._run, self._start_process, self._folder = run, start_process, folder
        (folder / "items_service.py").write_text(_SERVICE.format(topic=self.topic))
        self.driver = self.start_driver()
        self.pods = [self.start_pod() for _ in range(2)]

    def start_driver(self):
        """Begin the command, or go on with what it has begun."""
        return self._run(
            *("-m", "jobs_lib.cli", "reexport", "start", "items"),
            *("--rate", str(RATE), "--ranges", str(RANGES)),
            *spark_options(self.cluster.master),
            env={
                "JOBS_LIB_APP": "items_service:app",
                "JOBS_LIB_DATABASE_URL": self.database.url,
                "PYTHONPATH": f"{self._folder}:.",
            },
        )

    def start_pod(self):
        """Begin an executor and a relay."""
        return self._start_process(
            "reexport",
            self.database.url,
            kafka_bootstrap_servers=self.broker.bootstrap_servers,
            topic=self.topic,
        )

    def progress(self):
        """Return the progress; None if there is none, or no answer."""
        try:
            return reexport.status(self.database, "items")
        except (psycopg.OperationalError, UnavailableError, ReexportError):
            return None

    def await_progress(self, what, done):
        """Wait for some progress; a driver that has failed is started again."""

        def look():
            if not self.driver.running and self.driver.wait() != 0:
                self.cluster.mend()
                self.driver = self.start_driver()
            found = self.progress()
            return found is not None and done(found)

        wait_for(
            look,
            timeout=900,
            what=lambda: f"{what}: {self.progress()}\n{self.driver.output}",
        )

    def edit(self, chance):
        """Change some rows, as the service would; their states leave live."""
        keys = chance.sample(range(1, KEYS + 1), EDITS)
        with psycopg.connect(self.database.url) as connection:
            connection.execute(
                "update items set version = version + 1 where id = any (%s)", (keys,)
            )
            connection.execute(
                "select jobs_lib.send_current(%s, key::text, 'items', null::bigint)"
                " from unnest(%s::int[]) key",
                (self.topic, sorted(keys)),
            )

    def kill_driver(self):
        self.driver.kill()
        self.driver = self.start_driver()

    def kill_worker(self):
        self.cluster.kill("worker-0")
        self.cluster.start_worker("worker-0")

    def kill_pod(self):
        self.pods.pop(0).kill()
        self.pods.append(self.start_pod())

    def kill_broker(self):
        with self.broker.down():
            pass

    def kill_database(self):
        self.server.kill()
        self.server.start()
        wait_for(lambda: self.progress() is not None, timeout=120)


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
        own_broker() as broker,
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
        run = Run(cluster, server, broker, url, run_process, start_process, tmp_path)
        loading: list[Callable[[], None]] = [run.kill_driver, run.kill_worker]
        anywhere = [run.kill_pod, run.kill_broker, run.kill_database]
        chance.shuffle(loading)
        chance.shuffle(anywhere)
        kills = [*loading, *anywhere, run.kill_pod]
        for number, kill in enumerate(kills):
            if kill in loading:
                wanted = 10 + 30 * number + chance.randrange(20)
                run.await_progress(
                    f"{wanted} ranges", lambda p, n=wanted: p.loaded_ranges >= n
                )
            else:
                wanted = min(KEYS - 1_000, 3_000 * number + chance.randrange(2_000))
                run.await_progress(f"{wanted} sent", lambda p, n=wanted: p.sent >= n)
            print(f"{kill.__name__} at {run.progress()}")
            run.edit(chance)
            kill()
        run.await_progress("the end", lambda p: p.state == "finished")
        with psycopg.connect(url) as connection:
            wait_for(
                lambda: (
                    connection.execute(
                        "select count(*) from jobs_lib.outbox"
                    ).fetchone()
                    == (0,)
                ),
                timeout=120,
            )
            rows = connection.execute("select id::text, version from items").fetchall()
        records = read_topic(broker.bootstrap_servers, run.topic)
    print(f"{len(records)} records")
    newest: dict[str, int] = {}
    for record in records:
        version = record.json["version"]
        assert version >= newest.get(record.key, 0), record.key
        newest[record.key] = version
    assert newest == dict(rows)
    assert len(records) < 1.05 * KEYS + EDITS * len(kills)
