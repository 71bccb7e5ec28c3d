"""Enqueue one job per transaction, and many at once."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks import pieces
from benchmarks.figures import ratio
from benchmarks.peers.peer import OURS

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.peers.peer import Peer
    from benchmarks.worker import Row

_SECONDS = 4


def measure(bench: Bench) -> Figures:
    """Enqueue from one connection and from eight."""
    figures: Figures = {}
    for connections in (1, 8):
        rows = bench.alternate(
            {
                name: partial(enqueue_one_by_one, bench, peer, connections)
                for name, peer in bench.everyone.items()
            }
        )
        key = f"enqueue_{connections}conn"
        ours = rows[OURS.name]
        figures[f"{key}_jobs_s"] = ours.median("jobs_s")
        figures[f"{key}_p50_ms"] = ours.median("p50_ms")
        figures[f"{key}_p99_ms"] = ours.median("p99_ms")
        if ahead := bench.best_peer(rows, "jobs_s"):
            figures[f"{key}_best_peer"], theirs = ahead
            figures[f"{key}_best_peer_jobs_s"] = theirs
            figures[f"{key}_vs_best_peer"] = ratio(ours.median("jobs_s"), theirs)
    return figures


def measure_bulk(bench: Bench) -> Figures:
    """Enqueue 100,000 by one call, beside COPY of the same rows and beside River."""
    jobs = bench.size(100_000)
    found = {
        OURS.name: partial(_bulk, bench, OURS, jobs),
        "raw copy": partial(_raw_copy, bench, jobs),
    }
    for name, peer in bench.peers.items():
        found[name] = partial(_bulk, bench, peer, jobs)
    rows = bench.alternate(found)
    bench.server.forget()
    ours, copy = rows[OURS.name].median("jobs_s"), rows["raw copy"].median("jobs_s")
    figures: Figures = {
        "bulk_100k_jobs_s": ours,
        "bulk_100k_raw_copy_rows_s": copy,
        "bulk_100k_vs_raw_copy": ratio(ours, copy),
    }
    for name in bench.peers:
        theirs = rows[name].median("jobs_s")
        figures[f"bulk_100k_{name}_jobs_s"] = theirs
        figures[f"bulk_100k_vs_{name}"] = ratio(ours, theirs)
    return figures


def enqueue_one_by_one(bench: Bench, peer: Peer, connections: int) -> Row:
    """Enqueue one job per transaction on each connection, for some seconds."""
    bench.renew(peer)
    seconds = 1 if bench.quick else _SECONDS
    return pieces.run(
        bench.server, peer, "enqueue", connections=connections, seconds=seconds
    )


def _bulk(bench: Bench, peer: Peer, jobs: int) -> Row:
    bench.renew(peer)
    return pieces.run(bench.server, peer, "bulk", jobs=jobs, mode="plain")


def _raw_copy(bench: Bench, jobs: int) -> Row:
    """Copy the rows of a bulk call, read back as text, into the emptied table again."""
    bench.prepare(OURS, jobs)
    with bench.server.connect() as connection:
        with connection.cursor().copy("copy jobs_lib.jobs to stdout") as copy:
            blocks = _joined(bytes(block) for block in copy)
        connection.execute("truncate jobs_lib.jobs")
        connection.execute("checkpoint")
        began = perf_counter()
        with connection.cursor().copy("copy jobs_lib.jobs from stdin") as copy:
            for block in blocks:
                copy.write(block)
        took = perf_counter() - began
    return {"jobs": jobs, "seconds": took, "jobs_s": jobs / took}


def _joined(rows: object) -> list[bytes]:
    """Join rows to blocks of 256 KiB: else the calls for each row would be measured."""
    whole = b"".join(rows)  # type: ignore[arg-type]
    return [whole[start : start + 2**18] for start in range(0, len(whole), 2**18)]
