"""The cost of metrics: the drain with them, and a scrape while very many jobs wait."""

from __future__ import annotations

import time
import urllib.request
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import pieces
from benchmarks.figures import percentile, ratio
from benchmarks.measures.drain import BOX_SECONDS
from benchmarks.peers.peer import OURS
from benchmarks.worker import working
from jobs_lib.devstack.ports import free_port

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.worker import Row

_START_SECONDS = 60.0
_SCRAPES = 200
_PAUSE = 0.05
_MORE_ROUNDS = 5


def measure(bench: Bench) -> Figures:
    """Drain 300,000 with metrics and without; scrape amid 1,000,000.

    Both processes of the drain answer probes, and nothing scrapes them. A difference of
    some percent takes more rounds than usual to show.
    """
    rows = bench.alternate(
        {
            "metrics on": partial(_drain, bench, True),
            "metrics off": partial(_drain, bench, False),
        },
        rounds=_MORE_ROUNDS * bench.rounds,
    )
    scrapes = bench.alternate({"scrape": partial(_scrape, bench)}, rounds=1)["scrape"]
    bench.server.forget()
    return {
        "metrics_on_vs_off": ratio(
            rows["metrics on"].median("jobs_s"), rows["metrics off"].median("jobs_s")
        ),
        "scrape_p50_ms": scrapes.median("p50_ms"),
        "scrape_p99_ms": scrapes.median("p99_ms"),
    }


def _drain(bench: Bench, on: bool) -> Row:
    jobs = bench.size(300_000)
    bench.prepare(OURS, jobs)
    settings = {"probes_port": free_port(), "metrics": on}
    return pieces.drain(bench.server, OURS, jobs, BOX_SECONDS, settings)


def _scrape(bench: Bench) -> Row:
    """Scrape a worker repeatedly while it runs waiting jobs."""
    jobs = bench.size(1_000_000)
    bench.prepare(OURS, jobs)
    port = free_port()
    took = []
    with working(
        bench.server, OURS, {"probes_port": port}, jobs=jobs, seconds=120
    ) as worker:
        worker.await_event("first", _START_SECONDS)
        for _ in range(_SCRAPES):
            began = time.perf_counter()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                answer.read()
            took.append((time.perf_counter() - began) * 1e3)
            time.sleep(_PAUSE)
    return {"p50_ms": percentile(took, 0.5), "p99_ms": percentile(took, 0.99)}
