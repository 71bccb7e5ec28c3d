"""The service of the measured pods; the environment says which topic it reads."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs_lib import App, Job, Record

if TYPE_CHECKING:
    from psycopg import Connection

TOPIC = os.environ.get("BENCH_TOPIC", "local")
GROUP = f"{TOPIC}-group"
NOTES = Path(os.environ.get("BENCH_NOTES", os.devnull))
STATE = f"{TOPIC}-state"
"""The topic to which the zombies' service sends."""

app = App("bench", home=TOPIC)
state = app.topic(STATE, value=int, partitions=4)
POD = app.settings.pod
_TABLES = """
create table ran (job bigint, origin text, pod text, at double precision);
create table read (partition int, position bigint, pod text);
"""


def create_tables(connection: Connection[Any]) -> None:
    """Make the tables that the handlers write to, and that nothing else reads."""
    connection.execute(_TABLES)


@app.job()
def nothing(job: Job) -> None:
    """Take part in a drain."""


@app.job()
def mark(job: Job) -> None:
    """Note when it has run, by the clock that all processes of a machine share."""
    at = time.monotonic()
    with job.transaction() as connection:
        _note(connection, job, at)


@app.job()
def note(job: Job) -> None:
    """Note the same in a file: that costs nothing, and adds to no wait."""
    _write(job)


@app.job()
def linger(job: Job, seconds: float) -> None:
    """Note the begin of the job, and write a row at its end."""
    _write(job)
    time.sleep(seconds)
    with job.transaction() as connection:
        _note(connection, job, time.monotonic())


@app.job()
def wait(job: Job, seconds: float) -> None:
    """Hold a worker for a while."""
    time.sleep(seconds)


@app.job(group="key")
def follow_up(job: Job, key: str) -> None:
    """Run for a record, in order within its key."""
    with job.transaction() as connection:
        _note(connection, job, time.monotonic())


def _note(connection: Connection[Any], job: Job, at: float) -> None:
    connection.execute(
        "insert into ran values (%s, %s, %s, %s)", (job.id, job.origin, POD, at)
    )


def _write(job: Job) -> None:
    with NOTES.open("a") as file:
        file.write(f"{job.id} {job.origin} {time.monotonic()}\n")


if TOPIC != "local":

    @app.consumer(TOPIC, group=GROUP, value=int)
    def read(record: Record[int], connection: Connection[Any]) -> None:
        """Each record needs all three roles: read it, run a job, send a value."""
        connection.execute(
            "insert into read values (%s, %s, %s)",
            (record.partition, record.offset, POD),
        )
        assert record.key is not None
        follow_up.enqueue(connection, key=record.key)
        state.send(connection, key=record.key, value=record.value)
