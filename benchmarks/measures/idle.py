"""Idle: the use of an executor and its sessions while no job waits."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.machine import read_usage
from benchmarks.peers.peer import OURS
from benchmarks.worker import working

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.worker import Row

_START_SECONDS = 60.0
_SECONDS = 20.0


def measure(bench: Bench) -> Figures:
    """Measure an executor with 16 origins, with 100, and with 1,000."""
    counts = (16, 100, 1_000)
    rows = bench.alternate({f"{n} origins": partial(idle, bench, n) for n in counts})
    return {
        f"idle_cpu_pct_{n}_origins": rows[f"{n} origins"].median("cpu_pct")
        for n in counts
    }


def idle(bench: Bench, origins: int) -> Row:
    """Leave a worker alone; return its share of a core, with its sessions."""
    bench.renew(OURS)
    with bench.server.connect() as connection:
        connection.execute("update jobs_lib.topics set partitions = %s", [origins])
    # The worker waits for a job that never comes.
    given = {"jobs": 1, "seconds": 600}
    with working(bench.server, OURS, OURS.drain, **given) as worker:
        worker.await_event("ready", _START_SECONDS)
        deadline = time.monotonic() + _START_SECONDS
        owned = "select count(*) from jobs_lib.origins where owner is not null"
        while bench.server.ask(owned) != origins:
            if time.monotonic() > deadline:
                raise RuntimeError("the origins were not taken")
            time.sleep(0.1)
        seconds = 5.0 if bench.quick else _SECONDS
        time.sleep(1)  # the work after a take-over
        before = read_usage(worker.process.pid, bench.server.pid)
        time.sleep(seconds)
        used = read_usage(worker.process.pid, bench.server.pid) - before
    return {
        "cpu_pct": 100 * (used.worker + used.server) / seconds,
        "worker_cpu_pct": 100 * used.worker / seconds,
        "db_cpu_pct": 100 * used.server / seconds,
        "other_cpu": used.other / seconds,
    }
