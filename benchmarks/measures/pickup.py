"""Pick-up: from the return of the commit to the handler's first line, when idle."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks import pieces
from benchmarks.figures import ratio
from benchmarks.peers.peer import OURS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from benchmarks.bench import Bench, Figures
    from benchmarks.peers.peer import Peer
    from benchmarks.worker import Row

_LIMIT_SECONDS = 120.0


def measure(bench: Bench) -> Figures:
    """Pick up 500 jobs, 10 to 30 ms apart, with this library and all peers."""
    rows = bench.alternate(
        {name: partial(wait, bench, peer) for name, peer in bench.everyone.items()}
    )
    figures: Figures = {}
    for share in ("p50", "p99"):
        ours = rows[OURS.name].median(f"{share}_ms")
        figures[f"pickup_{share}_ms"] = ours
        if ahead := bench.best_peer(rows, f"{share}_ms", lowest=True):
            figures[f"pickup_{share}_best_peer"], theirs = ahead
            figures[f"pickup_{share}_best_peer_ms"] = theirs
            figures[f"pickup_{share}_vs_best_peer"] = ratio(theirs, ours)
    if "pickup_p50_vs_best_peer" in figures:
        figures["pickup_vs_best_peer"] = figures.pop("pickup_p50_vs_best_peer")
    return figures


def wait(bench: Bench, peer: Peer, settings: Mapping[str, Any] | None = None) -> Row:
    """Send jobs to a worker that has no other work."""
    bench.renew(peer)
    jobs = bench.size(500, quick=100)
    return pieces.pick_up(bench.server, peer, jobs, _LIMIT_SECONDS, settings=settings)[
        0
    ]
