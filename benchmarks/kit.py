"""The cost of a test with the test kit: `python -m benchmarks.kit`."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING

from jobs_lib import App, Job
from jobs_lib.testing import Jobs
from jobs_lib.testing.databases import Databases, embedded_server

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 50
app = App("bench")


@app.job(group="group")
def work(job: Job, group: str) -> None:
    with job.transaction():
        pass


def main() -> None:
    """Print the medians of some rounds, after one round to warm up."""
    started = time.perf_counter()
    with embedded_server() as server, Databases(server.url) as databases:
        with databases.fresh():
            pass
        took = time.perf_counter() - started
        print(f"once a run: server, migrations   {took * 1e3:7.0f} ms")
        load = os.getloadavg()[0]
        print(f"each test, on {os.cpu_count()} cores under a load of {load:.1f}:")

        def empty() -> None:
            with databases.fresh():
                pass

        def busy() -> None:
            with databases.fresh() as url, Jobs(app, url) as jobs:
                with jobs.transaction() as conn:
                    work.enqueue_many(conn, [{"group": str(n)} for n in range(10)])
                assert jobs.drain() == 10

        measure("a fresh database, dropped", empty)
        measure("the same, and ten jobs run", busy)


def measure(what: str, act: Callable[[], None]) -> None:
    """Print how long an action takes."""
    act()
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - started)
    median, fastest = statistics.median(seconds) * 1e3, min(seconds) * 1e3
    print(f"  {what:30} {median:7.0f} ms (median; fastest {fastest:.0f} ms)")


if __name__ == "__main__":
    main()
