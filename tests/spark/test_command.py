"""One command re-exports a whole entity: plan, load by Spark, run, watch."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs_lib import reexport
from tests.support.apps import make_app, running
from tests.support.records import read_topic

FLIGHTS = 336_776
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


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.guarantee("X1")
def test_the_command_plans_loads_and_runs_with_progress_rate_and_eta(
    database, bootstrap_servers, topic, connect, tmp_path, monkeypatch, wait_for
):
    name = topic(4, config={"cleanup.policy": "compact"})
    (tmp_path / "flights_service.py").write_text(SERVICE.format(topic=name))
    admin = connect(autocommit=True)
    admin.execute("create table flights (id int primary key, version int default 1)")
    admin.execute("insert into flights select generate_series(1, %s)", (FLIGHTS,))
    admin.execute("create table airlines (code text primary key)")
    admin.execute("insert into airlines select 'A' || generate_series(1, 16)")

    def command(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "jobs_lib.cli", "reexport", *args],
            capture_output=True,
            text=True,
            timeout=150,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(Path.home()),
                "PYTHONPATH": str(tmp_path),
                "JOBS_LIB_APP": "flights_service:app",
                "JOBS_LIB_DATABASE_URL": database.url,
                "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
            },
        )
        assert done.returncode == 0, done
        return done.stdout

    planned = command("start", "flights", "--rate", "6000", "--dry-run")
    assert "336,776 keys of flights.id (integer)" in planned
    assert "range 0: from the first up to " in planned
    assert "at 6,000 records a minute it takes 57.6 minutes, ends 20" in planned
    assert admin.execute("select count(*) from jobs_lib.jobs").fetchone() == (0,)

    started = command("start", "flights", "--rate", "6000")
    assert "running, 0 sent and 0 superseded of 336,776, 34 of 34 ranges" in started
    assert "6,000 records a minute, ends 20" in started
    (chunks, keys) = admin.execute(
        "select count(*), sum(jsonb_array_length(payload->'keys')) from jobs_lib.jobs"
    ).fetchone()
    assert keys == FLIGHTS
    assert chunks >= FLIGHTS / 100

    monkeypatch.syspath_prepend(tmp_path)
    service = importlib.import_module("flights_service")
    app = make_app(database.url, kafka_bootstrap_servers=bootstrap_servers)
    declared = service.app
    app.jobs, app.topics, app.entities = (
        declared.jobs,
        declared.topics,
        declared.entities,
    )
    with running(app, "executor", "relay"):
        wait_for(
            lambda: reexport.status(database, "flights").sent >= 300,
            timeout=60,
            what="some are sent",
        )
        status = json.loads(command("status", "flights", "--json"))
        if isinstance(status, list):
            (status,) = status
        assert status["state"] == "running"
        assert status["rate"] == 6_000
        assert status["total"] == FLIGHTS
        assert status["sent"] >= 300
        assert status["eta"] is not None
        command("cancel", "flights")
        # If asked to, the same command stays until the end.
        small = ("start", "airlines", "--rate", "60000", "--engine", "sql")
        assert "finished, 16 sent" in command(*small, "--watch")
    sent = read_topic(bootstrap_servers, name)
    assert len(sent) >= 316
    assert {r.key for r in sent} >= {f"A{n}" for n in range(1, 17)}
    assert all(
        r.headers["ce_cause"] == "reexport" and r.json["version"] == 1 for r in sent
    )
