"""Drain: how fast one worker process works through waiting jobs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks import pieces
from benchmarks.figures import ratio
from benchmarks.peers.peer import OURS

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.peers.peer import Peer
    from benchmarks.worker import Row

# A slower drain is measured by the part that it has done in this time.
BOX_SECONDS = 20.0
_WHOLE_SECONDS = 3_600.0


def measure(bench: Bench) -> Figures:
    """Drain 100,000 jobs, with this library and all peers."""
    jobs = bench.size(100_000)
    rows = bench.alternate(
        {
            name: partial(drain_all, bench, peer, jobs)
            for name, peer in bench.everyone.items()
        }
    )
    bench.server.forget()
    ours = rows[OURS.name]
    figures: Figures = {"drain_100k_jobs_s": ours.median("jobs_s")}
    for name in bench.peers:
        theirs = rows[name].median("jobs_s")
        figures[f"drain_100k_{name}_jobs_s"] = theirs
        figures[f"drain_100k_vs_{name}"] = ratio(ours.median("jobs_s"), theirs)
    return {
        **figures,
        "rss_mb": ours.median("rss_mb"),
        "executor_cpu_s_per_100k": ours.median("worker_cpu_s_per_100k"),
        "db_cpu_s_per_100k": ours.median("db_cpu_s_per_100k"),
        "dead_tuples_per_100k": ours.median("dead_tuples_per_100k"),
    }


def measure_1m(bench: Bench) -> Figures:
    """Drain ten times as many."""
    return _measure_depth(bench, 1_000_000, "1m")


def measure_10m(bench: Bench) -> Figures:
    """Drain a hundred times as many."""
    return _measure_depth(bench, 10_000_000, "10m")


def drain_all(bench: Bench, peer: Peer, jobs: int) -> Row:
    """Drain this many jobs without groups."""
    bench.prepare(peer, jobs)
    return pieces.drain(bench.server, peer, jobs, BOX_SECONDS)


def _measure_depth(bench: Bench, jobs: int, name: str) -> Figures:
    def drain(jobs: int) -> Row:
        bench.prepare(OURS, jobs)
        return pieces.drain(bench.server, OURS, jobs, _WHOLE_SECONDS)

    rows = bench.alternate(
        {
            "drain_100k": partial(drain, bench.size(100_000)),
            f"drain_{name}": partial(drain, bench.size(jobs)),
        }
    )
    bench.server.forget()
    deep = rows[f"drain_{name}"].median("jobs_s")
    return {
        f"drain_{name}_jobs_s": deep,
        f"drain_{name}_vs_100k": ratio(deep, rows["drain_100k"].median("jobs_s")),
        f"rss_mb_{name}": rows[f"drain_{name}"].median("rss_mb"),
    }
