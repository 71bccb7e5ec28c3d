"""Helpers that the tests of faults share."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from tests.support import wait_for
from tests.support.apps import make_app

if TYPE_CHECKING:
    from jobs_lib.ownership import Process
    from tests.support import Worker

TABLES = """
create table effects (
    n int, job bigint, attempt int, at timestamptz default clock_timestamp()
);
create table calls (n int, key text, attempt int);
"""


def enqueue(url: str, name: str, count: int) -> None:
    """Enqueue jobs n = 0, 1, … of a type of the worker."""
    app = make_app(url)

    def handler(job, n: int) -> None: ...

    handler.__name__ = name
    job_type = app.job(name=name)(handler)
    with psycopg.connect(url) as connection:
        job_type.enqueue_many(connection, [{"n": n} for n in range(count)])


def count(url: str, table: str = "jobs_lib.jobs") -> int:
    """Count the rows of a table, on a connection of its own."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(f"select count(*) from {table}").fetchone()
    assert row is not None
    return int(row[0])


def attempts(url: str) -> set[tuple[str, int]]:
    """Return each pair of an outcome and its attempt once."""
    with psycopg.connect(url) as connection:
        return set(connection.execute("select outcome, attempt from jobs_lib.history"))


def effects(url: str) -> list[int]:
    """Return the numbers of the jobs that left an effect, in order."""
    with psycopg.connect(url) as connection:
        rows = connection.execute("select n from effects order by n")
        return [row[0] for row in rows]


def await_heartbeats(admin: Any, process: Process, number: int = 1) -> None:
    """Wait until a process has sent some more heartbeats."""
    for _ in range(number):
        _await_heartbeat(admin, process)


def _await_heartbeat(admin: Any, process: Process) -> None:
    query = "select heartbeat_at from jobs_lib.processes where id = %s"
    before = admin.execute(query, (process.id,)).fetchone()
    wait_for(
        lambda: admin.execute(query, (process.id,)).fetchone() > before,
        what="its heart beats",
    )


class Use:
    """The CPU seconds and log lines of a process since this object was made."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._since = time.monotonic()
        self._cpu = self._read()
        self._lines = len(worker.errors)

    def _read(self) -> float:
        stat = Path(f"/proc/{self._worker.pid}/stat").read_text().rpartition(")")[2]
        ticks = sum(map(int, stat.split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    @property
    def share(self) -> float:
        """The share of one core."""
        return (self._read() - self._cpu) / (time.monotonic() - self._since)

    @property
    def lines(self) -> int:
        """The lines that the library has written to its log."""
        return sum("jobs_lib:" in line for line in self._worker.errors[self._lines :])
