"""An old transaction stays open, so no row that dies after its begin can be removed.

Jobs are sent at a steady rate while another session's transaction is idle, and for a
while before it begins. With the transaction still open, bulks are drained. They
alternate with the same bulks on a second server without such a transaction, since a
machine may change within ten minutes.
"""

from __future__ import annotations

import contextlib
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import chart, pieces
from benchmarks.bench import Rows, rounded
from benchmarks.figures import bucketed, percentile, ratio
from benchmarks.peers.peer import OURS
from benchmarks.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bench import Bench, Figures
    from benchmarks.peers.peer import Peer
    from benchmarks.worker import Row

PER_SECOND = 800
_CONNECTIONS = 4
_COMPARED = ("graphile", "pgqueuer", "river")
_DRAIN_SECONDS = 60.0


def measure(bench: Bench) -> Figures:
    """Measure this library, and the peers that can keep up with the rate."""
    figures: Figures = {}
    curves: dict[str, Any] = {}
    for name, peer in bench.everyone.items():
        if peer is not OURS and name not in _COMPARED:
            continue
        found = _Held(bench, peer)
        found.run()
        curves[name] = found.curve
        prefix = "held_xmin" if peer is OURS else f"held_xmin_{name}"
        figures[f"{prefix}_drain_ratio"] = ratio(
            found.drains["held"].median("jobs_s"),
            found.drains["beside"].median("jobs_s"),
        )
        figures[f"{prefix}_pickup_p99_x"] = ratio(
            found.waits["held"].median("p99_ms"), found.waits["before"].median("p99_ms")
        )
        figures[f"{prefix}_pickup_p99_ms"] = found.waits["held"].median("p99_ms")
        figures[f"{prefix}_sent_s"] = found.waits["held"].median("sent_s")
    bench.out.mkdir(parents=True, exist_ok=True)
    data = bench.out / "held_xmin.json"
    data.write_text(json.dumps(rounded(curves)) + "\n")
    drawn = chart.draw_held_xmin(data, bench.out / "held_xmin.svg")
    bench.tell(f"curves: {data}" + (f", {drawn}" if drawn else "; no matplotlib"))
    return figures


class _Held:
    """One peer under the open transaction, and without it."""

    def __init__(self, bench: Bench, peer: Peer) -> None:
        self._bench = bench
        self._peer = peer
        self.waits = {"before": Rows(), "held": Rows()}
        self.drains = {"beside": Rows(), "held": Rows()}
        self.curve: list[dict[str, Any]] = []

    def run(self) -> None:
        """Run everything, one part after the other."""
        seconds = self._bench.held_seconds
        self._bench.renew(self._peer)
        self._wait("before", max(15, seconds // 10))
        self._bench.renew(self._peer)
        with _open_transaction(self._bench):
            self._wait("held", seconds)
            with Server() as beside:
                beside.renew()
                pieces.run(beside, self._peer, "setup")
                self._drain({"beside": beside, "held": self._bench.server})

    def _wait(self, when: str, seconds: int) -> None:
        gap = 1_000 / PER_SECOND

        def wait() -> Row:
            row, points = pieces.pick_up(
                self._bench.server,
                self._peer,
                PER_SECOND * seconds,
                seconds,
                gap_ms=(gap, gap),
                connections=_CONNECTIONS,
            )
            if when == "held":
                self.curve = make_curve(points, max(1, seconds // 60))
            return row

        name = f"{self._peer.name} {when}: pick-up at {PER_SECOND}/s for {seconds} s"
        self._note(self.waits[when], self._bench.attempt(name, wait))

    def _drain(self, servers: dict[str, Server]) -> None:
        jobs = self._bench.size(100_000)

        def drain(server: Server) -> Row:
            pieces.run(server, self._peer, "bulk", jobs=jobs, mode="plain")
            server.settle()
            return pieces.drain(server, self._peer, jobs, _DRAIN_SECONDS)

        drains = {
            f"{self._peer.name} {when}: drain": partial(drain, server)
            for when, server in servers.items()
        }
        found = self._bench.alternate(drains)
        for when, rows in zip(servers, found.values(), strict=True):
            self.drains[when] = rows

    def _note(self, rows: Rows, row: Row | None) -> None:
        if row is not None:
            rows.rows.append(row)


def make_curve(
    points: list[tuple[float, float]], width: int
) -> list[dict[str, float | None]]:
    """Jobs started per second, and their waits, in spans of ``width`` seconds.

    Args:
        points: for each job the second of its commit, and its wait in milliseconds.
        width: the seconds of a span.
    """
    started = [(at + wait / 1e3, wait) for at, wait in points]
    return [
        {
            "at_s": at,
            "jobs_s": len(waits) / width,
            "p50_ms": percentile(waits, 0.5),
            "p99_ms": percentile(waits, 0.99),
        }
        for at, waits in bucketed(started, width)
    ]


@contextlib.contextmanager
def _open_transaction(bench: Bench) -> Iterator[None]:
    """A session that has taken its snapshot, and then does nothing."""
    with bench.server.connect() as connection:
        connection.execute("begin isolation level repeatable read")
        connection.execute("select count(*) from pg_class")
        yield
        connection.execute("rollback")
