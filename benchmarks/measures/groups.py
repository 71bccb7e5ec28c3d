"""Groups: many at once, one hot, blocked by their heads, or thousands paused."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks import pieces
from benchmarks.figures import ratio
from benchmarks.measures.drain import BOX_SECONDS
from benchmarks.peers.peer import OURS

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.peers.peer import Peer
    from benchmarks.worker import Row

# Half of the jobs of the hot measure are in the small groups.
_LIMIT_SECONDS = 120.0
_FREE = 'select exists (select from jobs_lib.jobs where "group" is null)'


def measure(bench: Bench) -> Figures:
    """Run 100,000 jobs in 1,000 groups, beside jobs without groups and pg-boss."""
    jobs = bench.size(100_000)
    found = {
        "ungrouped": partial(_drain, bench, "plain", jobs),
        "groups_1000": partial(_drain, bench, "groups", jobs),
    }
    if "pgboss" in bench.peers:
        peer = bench.peers["pgboss"]
        found["groups_1000 pgboss"] = partial(_drain_peer, bench, peer, jobs)
    rows = bench.alternate(found)
    bench.server.forget()
    figures = rows["groups_1000"].median("jobs_s")
    result: Figures = {
        "groups_1000_jobs_s": figures,
        "groups_1000_vs_ungrouped": ratio(figures, rows["ungrouped"].median("jobs_s")),
    }
    if "pgboss" in bench.peers:
        theirs = rows["groups_1000 pgboss"].median("jobs_s")
        result["groups_1000_pgboss_jobs_s"] = theirs
        result["groups_1000_vs_pgboss"] = ratio(figures, theirs)
    return result


def measure_hot(bench: Bench) -> Figures:
    """Run 50,000 jobs of one group, mixed with 50,000 jobs of 1,000 small groups."""
    jobs = bench.size(100_000)
    rows = bench.alternate(
        {
            "ungrouped": partial(_drain, bench, "plain", jobs),
            "hot": partial(_drain, bench, "hot", jobs),
            "small alone": partial(_drain, bench, "groups", jobs // 2),
        }
    )
    bench.server.forget()
    hot = rows["hot"]
    return {
        "hot_group_vs_ungrouped": ratio(
            hot.median("jobs_s"), rows["ungrouped"].median("jobs_s")
        ),
        "hot_key_jobs_s": hot.median("hot_jobs_s"),
        "hot_small_x": ratio(
            hot.median("small_s"), rows["small alone"].median("small_s")
        ),
    }


def measure_blocked(bench: Bench) -> Figures:
    """Run 100,000 free jobs behind 100,000 groups that wait for their heads.

    The time counts from the worker's start: the worker gets past the blocked groups
    before its first handler.
    """
    jobs = bench.size(100_000)
    rows = bench.alternate(
        {
            "no blocked heads": partial(_drain, bench, "plain", jobs),
            "blocked heads": partial(_drain, bench, "blocked", jobs),
        }
    )
    bench.server.forget()
    return {
        "blocked_heads_vs_none": ratio(
            rows["no blocked heads"].median("from_ready_s"),
            rows["blocked heads"].median("from_ready_s"),
        ),
        "blocked_heads_drain_s": rows["blocked heads"].median("from_ready_s"),
    }


def measure_crowded(bench: Bench) -> Figures:
    """Run 100,000 jobs in 1,000 groups beside remains of earlier work.

    The remains are 100,000 discarded jobs, as many paused groups, and as many requests
    to cancel.
    """
    jobs = bench.size(100_000)
    rows = bench.alternate(
        {
            "nothing left behind": partial(_drain, bench, "groups", jobs),
            "crowded": partial(_drain, bench, "crowded", jobs),
        }
    )
    bench.server.forget()
    return {
        "crowded_vs_none": ratio(
            rows["nothing left behind"].median("from_ready_s"),
            rows["crowded"].median("from_ready_s"),
        )
    }


def _drain(bench: Bench, mode: str, jobs: int) -> Row:
    bench.prepare(OURS, jobs, mode)
    unfinished = _FREE if mode == "blocked" else None
    return pieces.drain(bench.server, OURS, jobs, _LIMIT_SECONDS, unfinished=unfinished)


def _drain_peer(bench: Bench, peer: Peer, jobs: int) -> Row:
    bench.prepare(peer, jobs, "groups", peer.groups_setup)
    return pieces.drain(bench.server, peer, jobs, BOX_SECONDS, peer.groups)
