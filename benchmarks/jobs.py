"""Jobs: bulk enqueue, drain and pick-up, on a real and durable PostgreSQL.

``python -m benchmarks.jobs [--jobs 100000] [--rounds 3]`` prints one JSON line at the
end. Every figure is the median of the rounds; the limits beside them are raw SQL on the
same server in the same rounds, so that the ratios mean something on a noisy machine.
"""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import click
import psycopg

from jobs_lib import App, Job, __version__
from jobs_lib.devstack import PostgresServer
from jobs_lib.schema import migrate
from jobs_lib.service import Service
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

PICKUPS = 300


class Bench:
    """One server, one app with the default settings, one executor in this process."""

    def __init__(self, url: str) -> None:
        self.app = App("bench", settings=load_settings(database_url=url))
        self.url = url
        self.left = 0
        self.done = threading.Event()
        self.started_at = 0.0

        @self.app.job(group="group")
        def work(job: Job, i: int, group: str | None = None) -> None:
            self.started_at = time.perf_counter()
            self.left -= 1
            if self.left <= 0:
                self.done.set()

        self.work = work

    def enqueue(self, jobs: int, groups: int = 0) -> float:
        """Jobs a second of one bulk call."""
        self.left = jobs
        self.done.clear()
        payloads: list[dict[str, Any]] = [
            {"i": i, "group": f"g{i % groups}"} if groups else {"i": i}
            for i in range(jobs)
        ]
        started = time.perf_counter()
        with psycopg.connect(self.url) as connection:
            self.work.enqueue_many(connection, payloads)
        took = time.perf_counter() - started
        self._settle()
        return jobs / took

    def drain(self, jobs: int) -> float:
        """Jobs a second, from the executor's start until the table is empty."""
        with self._executing() as started, self._watching() as watching:
            self.done.wait(600)
            while watching.execute("select from jobs_lib.jobs limit 1").fetchone():
                time.sleep(0.005)
            return jobs / (time.perf_counter() - started)

    def pick_up(self) -> list[float]:
        """Milliseconds from the return of the commit to the handler's first line."""
        found: list[float] = []
        with self._executing(), psycopg.connect(self.url) as connection:
            for i in range(PICKUPS):
                self.left = 1
                self.done.clear()
                self.work.enqueue(connection, i=i)
                connection.commit()
                committed = time.perf_counter()
                self.done.wait(10)
                found.append(max(0.0, self.started_at - committed) * 1000)
                time.sleep(0.01)
        return found

    def copy(self, jobs: int) -> float:
        """Rows a second of a plain COPY of the same rows: what bounds the bulk call."""
        line = b'local/1\twork\t\\N\tavailable\t{"i":1}\t\\N\t\\N\n'
        block = line * 2_000
        started = time.perf_counter()
        with psycopg.connect(self.url) as connection:
            cursor = connection.cursor()
            with cursor.copy(
                'copy jobs_lib.jobs (origin, type, "group", state, payload, run_at,'
                " headers) from stdin"
            ) as copy:
                for _ in range(jobs // 2_000):
                    copy.write(block)
        took = time.perf_counter() - started
        self._settle()
        return jobs / took

    def claim_and_delete(self, jobs: int) -> float:
        """Rows a second of raw SQL that claims and completes 1,000 at a time."""
        started = time.perf_counter()
        with self._watching() as connection:
            while (
                connection.execute(
                    "delete from jobs_lib.jobs where ctid = any (array("
                    " select ctid from jobs_lib.jobs where origin = 'local/1'"
                    " order by id limit 1000 for update skip locked))"
                ).rowcount
                > 0
            ):
                pass
        return jobs / (time.perf_counter() - started)

    @contextlib.contextmanager
    def _executing(self) -> Iterator[float]:
        service = Service(self.app, ["executor"])
        started = time.perf_counter()
        service.start()
        try:
            yield started
        finally:
            service.stop()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            yield connection

    def _settle(self) -> None:
        """What the enqueue left to do must not be paid for by what comes next."""
        with self._watching() as connection:
            connection.execute("vacuum analyze jobs_lib.jobs")
            connection.execute("checkpoint")


def measure(bench: Bench, jobs: int, rounds: int) -> dict[str, float]:
    """Median figures; the kinds of work alternate within each round."""
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)
        click.echo(f"  {name}: {value:,.1f}", err=True)

    for number in range(1, rounds + 1):
        click.echo(f"round {number} of {rounds}", err=True)
        note("bulk_jobs_s", bench.enqueue(jobs))
        note("drain_jobs_s", bench.drain(jobs))
        note("raw_copy_rows_s", bench.copy(jobs))
        note("raw_claim_delete_rows_s", bench.claim_and_delete(jobs))
        note("bulk_1000_groups_jobs_s", bench.enqueue(jobs, 1_000))
        note("drain_1000_groups_jobs_s", bench.drain(jobs))
        pickups = sorted(bench.pick_up())
        note("pickup_p50_ms", pickups[len(pickups) // 2])
        note("pickup_p99_ms", pickups[int(len(pickups) * 0.99)])
    return {name: statistics.median(values) for name, values in found.items()}


@click.command()
@click.option("--jobs", default=100_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(jobs: int, rounds: int) -> None:
    """Measure bulk enqueue, drain and pick-up."""
    with PostgresServer.ephemeral(
        durable=True, options={"shared_buffers": "1GB", "jit": "off"}
    ) as server:
        migrate(server.url)
        figures = measure(Bench(server.url), jobs, rounds)
        with psycopg.connect(server.url) as connection:
            version = connection.info.server_version
    figures["bulk_vs_raw_copy"] = figures["bulk_jobs_s"] / figures["raw_copy_rows_s"]
    figures["drain_vs_raw_claim_delete"] = (
        figures["drain_jobs_s"] / figures["raw_claim_delete_rows_s"]
    )
    figures["groups_1000_vs_ungrouped"] = (
        figures["drain_1000_groups_jobs_s"] / figures["drain_jobs_s"]
    )
    result: dict[str, Any] = {
        "benchmark": "jobs",
        "jobs": jobs,
        "rounds": rounds,
        "jobs_lib": __version__,
        "postgresql": version,
        "python": platform.python_version(),
        **{name: round(value, 3) for name, value in figures.items()},
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
