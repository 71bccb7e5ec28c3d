"""Limits: the cost of a limit on jobs at once, by type and by value."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import pieces
from benchmarks.figures import ratio
from benchmarks.measures.drain import BOX_SECONDS
from benchmarks.peers.peer import OURS

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.worker import Row


def measure(bench: Bench) -> Figures:
    """Drain 100,000 jobs of 1,000 tenants, without a limit and with each kind."""
    rows = bench.alternate(
        {
            "without a limit": partial(_drain, bench, None),
            "limit of a type": partial(_drain, bench, 4),
            "limit by value": partial(_drain, bench, [2, "tenant"]),
        }
    )
    bench.server.forget()
    without = rows["without a limit"].median("jobs_s")
    by_type = ratio(rows["limit of a type"].median("jobs_s"), without)
    by_value = ratio(rows["limit by value"].median("jobs_s"), without)
    return {"limits_used_vs_without": by_type, "limits_by_value_vs_without": by_value}


def _drain(bench: Bench, limit: Any) -> Row:
    jobs = bench.size(100_000)
    bench.prepare(OURS, jobs, "tenants")
    return pieces.drain(bench.server, OURS, jobs, BOX_SECONDS, limit=limit)
