"""Memory of the executor's process while large payloads wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import pieces
from benchmarks.peers.peer import OURS

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.worker import Row

_LIMIT_SECONDS = 120.0


def measure(bench: Bench) -> Figures:
    """Measure it with 3,000 payloads of 64 KiB."""
    jobs = bench.size(3_000, quick=1_500)

    def drain() -> Row:
        bench.prepare(OURS, jobs, "heavy")
        return pieces.drain(bench.server, OURS, jobs, _LIMIT_SECONDS)

    rows = bench.alternate({"64 KiB payloads": drain})["64 KiB payloads"]
    bench.server.forget()
    return {"rss_mb_64k": rows.median("rss_mb"), "jobs_s_64k": rows.median("jobs_s")}
