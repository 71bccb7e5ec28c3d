"""Pods whose origins follow the partitions of their home topic."""

from __future__ import annotations

import threading
import urllib.request
from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib import exponential
from jobs_lib.service.preparation import PARTS
from tests.support.processes.kinds import home_of, kind
from tests.support.say import say

if TYPE_CHECKING:
    from jobs_lib import App, Job

MAY_END = "create table may_end (pod text)"
"""The pods whose jobs may end."""
TOTALS = """
create table totals (key text primary key, records int, sum int);
create table states (key text primary key, version int, sum int);
"""
"""The tables in which `steps` counts."""


def consume_nothing(app: App) -> None:
    """Be a member of the home topic's group."""
    home = home_of(app)

    @app.consumer(home, group=f"{home}-service")
    def handle(record: Any, connection: Any) -> None: ...


def await_end(app: App) -> None:
    """Wait until the test allows this pod's jobs to end."""
    with psycopg.connect(app.settings.database_url, autocommit=True) as connection:
        ask = "select from may_end where pod = %s"
        while not connection.execute(ask, (app.settings.pod,)).rowcount:
            threading.Event().wait(0.05)


@kind("consumers", "executor")
def calls(app: App, server: str) -> None:
    """Each job calls an HTTP server and does nothing else."""
    consume_nothing(app)

    @app.job(group="key")
    def work(job: Job, key: str) -> None:
        with urllib.request.urlopen(f"{server}/{app.settings.pod}/{job.id}") as answer:
            answer.read()


@kind("consumers")
def beside_sidecar(app: App) -> None:
    """The service. Its jobs run in the sidecar."""
    consume_nothing(app)
    _say_origin(app)


@kind("executor", is_sidecar=True)
def sidecar(app: App) -> None:
    """The sidecar of the same pod."""
    consume_nothing(app)
    _say_origin(app)


def _say_origin(app: App) -> None:
    @app.job()
    def work(job: Job) -> None:
        say(f"ran {job.origin}")


# The group waits this long for a pod that dies.
@kind(*PARTS, workers=2, session_timeout=120, shutdown_timeout=600)
def pod(app: App) -> None:
    """Each job ends when the test allows it."""
    consume_nothing(app)

    @app.job()
    def work(job: Job) -> None:
        say(f"started {job.id}")
        await_end(app)
        say(f"ended {job.id}")


@kind("consumers", "executor", workers=2, assignment_strategy="range")
def zombie(app: App) -> None:
    """Each record and job has an effect, and jobs hold their transactions open."""
    home = home_of(app)

    @app.consumer(home, group=f"{home}-service")
    def handle(record: Any, connection: Any) -> None:
        insert = "insert into read values (%s, %s)"
        connection.execute(insert, (record.value, app.settings.pod))

    @app.job(group="key")
    def work(job: Job, key: str) -> None:
        with job.transaction() as connection:
            connection.execute("update keys set seen = seen + 1 where key = %s", (key,))
            insert = "insert into effects values (%s, %s)"
            connection.execute(insert, (job.id, app.settings.pod))
            say(f"started {job.id}")
            await_end(app)
        say(f"ended {job.id}")


@kind(*PARTS, consumer_block=50, relay_block=100)
def steps(app: App, target: str) -> None:
    """An app that reads blocks, keeps totals in jobs, and sends states to a target."""
    states = app.topic(target, compacted=True, partitions=2, merge=False)
    home = home_of(app)

    @app.consumer(home, group=f"{home}-steps")
    def handle(record: Any, connection: Any) -> None:
        connection.execute(
            "insert into totals as t values (%s, 1, %s) on conflict (key) do update"
            " set records = t.records + 1, sum = t.sum + excluded.sum",
            (record.key, record.value),
        )
        publish.enqueue(connection, key=record.key, n=record.value)

    @app.job(group="key", retry=exponential(first=0.05, cap=0.05))
    def publish(job: Job, key: str, n: int) -> None:
        if key == "bad":
            raise ValueError("cannot be handled")
        with job.transaction() as connection:
            row = connection.execute(
                "insert into states as s values (%s, 1, %s) on conflict (key) do update"
                " set version = s.version + 1, sum = s.sum + excluded.sum"
                " returning version, sum",
                (key, n),
            ).fetchone()
            assert row is not None
            version, total = row
            value = {"sum": total, "last": n}
            states.send(connection, key=key, value=value, version=version)
