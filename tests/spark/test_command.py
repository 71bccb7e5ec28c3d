"""One command re-exports a whole entity: plan, load by Spark, run, watch."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import psycopg
import pytest

from jobs_lib import reexport
from jobs_lib.postgres.database import Database
from tests.support.apps import make_app, running
from tests.support.records import read_topic
from tests.support.topics import create_topic, delete_topics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib import App
    from tests.support.records import Seen

FLIGHTS = 336_776
TABLES = """
create table flights (id int primary key, version int default 1);
create table airlines (code text primary key);
insert into airlines select 'A' || generate_series(1, 16);
"""
SERVICE = """
from jobs_lib import App

app = App("flights")
topic = app.topic("{topic}", compacted=True)

@app.entity(topic, source="flights", key="id")
def load(conn, keys):
    rows = conn.execute(
        "select id, version from flights where id = any (%s::int[])",
        ([*map(int, keys)],),
    )
    return {{str(i): {{"id": i, "version": v}} for i, v in rows}}

@app.entity(topic, source="airlines", key="code")
def load_airlines(conn, codes):
    return {{code: {{"code": code, "version": 1}} for code in codes}}
"""
COMPACTED = {"cleanup.policy": "compact"}


class Flights:
    """A service with flights and airlines: its tables, its command and its app."""

    def __init__(self, url: str, servers: str, topic: str, folder: Path) -> None:
        self.database = Database(url)
        self.topic = topic
        self._servers = servers
        self._module = folder / "flights_service.py"
        self._module.write_text(SERVICE.format(topic=topic))
        with psycopg.connect(url) as connection:
            connection.execute(TABLES)
            insert = "insert into flights select generate_series(1, %s)"
            connection.execute(insert, (FLIGHTS,))

    def command(self, *args: str) -> str:
        """Return what a command about re-exports prints."""
        done = subprocess.run(
            [sys.executable, "-m", "jobs_lib.cli", "reexport", *args],
            capture_output=True,
            text=True,
            timeout=150,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(Path.home()),
                "PYTHONPATH": str(self._module.parent),
                "JOBS_LIB_APP": "flights_service:app",
                "JOBS_LIB_DATABASE_URL": self.database.url,
                "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": self._servers,
            },
        )
        assert done.returncode == 0, done
        return done.stdout

    def load_app(self) -> App:
        """Return the app of the service, with quick settings."""
        app = make_app(self.database.url, kafka_bootstrap_servers=self._servers)
        declared = runpy.run_path(str(self._module))["app"]
        app.jobs, app.topics, app.entities = (
            declared.jobs,
            declared.topics,
            declared.entities,
        )
        return app

    def read_jobs(self) -> tuple[int, int]:
        """Return how many jobs there are, and how many keys they have."""
        with psycopg.connect(self.database.url) as connection:
            row = connection.execute(
                "select count(*), coalesce(sum(jsonb_array_length(payload->'keys')), 0)"
                " from jobs_lib.jobs"
            ).fetchone()
        assert row is not None
        return row

    def read_sent(self) -> list[Seen]:
        """Return the records of the topic; each must be a re-export's."""
        sent = read_topic(self._servers, self.topic)
        assert all(
            r.headers["ce_cause"] == "reexport" and r.json["version"] == 1 for r in sent
        )
        return sent


@pytest.fixture
def flights(database_url, bootstrap_servers, topic, tmp_path) -> Flights:
    """The service of a test alone, of which nothing is re-exported yet."""
    name = topic(4, config=COMPACTED)
    return Flights(database_url, bootstrap_servers, name, tmp_path)


class Loaded(NamedTuple):
    """A re-export whose jobs one command has enqueued."""

    flights: Flights
    output: str
    """The text that the command has printed."""
    jobs: int
    keys: int
    """The number of keys in these jobs."""


@pytest.fixture(scope="module")
def loaded(
    jobs_databases, bootstrap_servers, kafka_admin, tmp_path_factory
) -> Iterator[Loaded]:
    """A re-export of all flights, loaded by Spark once, since that takes long."""
    name = f"test-{uuid4().hex[:12]}"
    create_topic(kafka_admin, name, 4, COMPACTED)
    try:
        with jobs_databases.fresh() as url:
            folder = tmp_path_factory.mktemp("flights")
            flights = Flights(url, bootstrap_servers, name, folder)
            output = flights.command("start", "flights", "--rate", "6000")
            yield Loaded(flights, output, *flights.read_jobs())
    finally:
        delete_topics(kafka_admin, [name])


@pytest.mark.slow
def test_a_dry_run_prints_the_plan_and_enqueues_nothing(flights):
    planned = flights.command("start", "flights", "--rate", "6000", "--dry-run")
    assert "336,776 keys of flights.id (integer)" in planned
    assert "range 0: from the first up to " in planned
    assert "at 6,000 records a minute it takes 57.6 minutes, ends 20" in planned
    assert flights.read_jobs() == (0, 0)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.guarantee("X1")
def test_one_command_loads_every_key_and_prints_the_rate_and_the_end(loaded):
    progress = "running, 0 sent and 0 superseded of 336,776, 17 of 17 ranges"
    assert progress in loaded.output
    assert "6,000 records a minute, ends 20" in loaded.output
    assert loaded.keys == FLIGHTS
    assert loaded.jobs >= FLIGHTS / 100


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.guarantee("X1")
def test_the_status_of_a_loaded_re_export_has_progress_rate_and_end(loaded, wait_for):
    flights = loaded.flights
    with running(flights.load_app(), "executor", "relay"):
        wait_for(
            lambda: reexport.status(flights.database, "flights").sent >= 300,
            timeout=60,
            what="some are sent",
        )
        status = json.loads(flights.command("status", "flights", "--json"))
        if isinstance(status, list):
            (status,) = status
        assert status["state"] == "running"
        assert status["rate"] == 6_000
        assert status["total"] == FLIGHTS
        assert status["sent"] >= 300
        assert status["eta"] is not None
        flights.command("cancel", "flights")
    assert len(flights.read_sent()) >= 300


@pytest.mark.slow
@pytest.mark.guarantee("X1")
def test_a_command_that_is_asked_to_watch_stays_until_the_end(flights):
    with running(flights.load_app(), "executor", "relay"):
        small = ("start", "airlines", "--rate", "60000", "--engine", "sql")
        assert "finished, 16 sent" in flights.command(*small, "--watch")
    sent = flights.read_sent()
    assert len(sent) >= 16
    assert {r.key for r in sent} >= {f"A{n}" for n in range(1, 17)}
