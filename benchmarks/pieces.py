"""The pieces of measures: one adapter does one thing, and is watched closely.

Each returns a row of raw figures. Its `other_cpu` says how many cores other processes
used meanwhile: distrust rows above 0.3.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import percentile
from benchmarks.machine import peak_rss_mb, read_usage
from benchmarks.peers.peer import REPOSITORY, argv
from benchmarks.worker import PieceError, working

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.machine import Usage
    from benchmarks.peers.peer import Peer
    from benchmarks.server import Server
    from benchmarks.worker import Row

_START_SECONDS = 60.0
_FINISH_SECONDS = 60.0
_SESSIONS_SECONDS = 0.1
_WARM_UP_JOBS = 20


def run(server: Server, peer: Peer, command: str, **given: Any) -> Row:
    """Run a command that ends by itself; return its last line and its CPU."""
    before, began = read_usage(None, server.pid), time.monotonic()
    children = _children_cpu()
    done = subprocess.run(
        argv(peer, command, given),
        cwd=REPOSITORY,
        env=server.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.monotonic() - began
    # Its sessions are about to end; the count would miss a session that ends during it.
    time.sleep(_SESSIONS_SECONDS)
    used = read_usage(None, server.pid) - before
    if done.returncode:
        said = done.stderr[-1_000:].strip()
        raise PieceError(f"{peer.name}: {command} failed. {said}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    row: Row = json.loads(lines[-1]) if lines else {}
    client = _children_cpu() - children
    row["client_cpu_s"] = client
    row["db_cpu_s"] = used.server
    row["other_cpu"] = max(0.0, used.other - client) / took
    if "seconds" in row:
        row["jobs_s"] = row["jobs"] / row["seconds"]
    return row


def drain(
    server: Server,
    peer: Peer,
    jobs: int,
    seconds: float,
    settings: Mapping[str, Any] | None = None,
    unfinished: str | None = None,
    **given: Any,
) -> Row:
    """Run all waiting jobs, or as many as a worker can run in some seconds.

    ``given`` goes to the adapter unchanged. The time counts from the first handler's
    start until the table has no unfinished job, or until the time is up.
    """
    chosen = peer.drain if settings is None else settings
    dead = server.dead_tuples()
    with working(server, peer, chosen, jobs=jobs, seconds=seconds, **given) as worker:
        pid = worker.process.pid
        ready = worker.await_event("ready", _START_SECONDS)["at"]
        worker.await_event("first", _START_SECONDS)
        before, began = read_usage(pid, server.pid), time.monotonic()
        end = worker.await_event("end", seconds + _FINISH_SECONDS)
        complete = end["jobs"] >= jobs
        if complete:
            last = await_finish(server, unfinished or peer.unfinished)
        else:
            last = end["first"] + int(seconds * 1e9)
        used, took = read_usage(pid, server.pid) - before, time.monotonic() - began
        rss = peak_rss_mb(pid)
    per_100k = 100_000 / end["jobs"]
    # A worker's connections report their dead rows when they end.
    dead = server.dead_tuples() - dead
    return {
        "jobs": end["jobs"],
        "complete": complete,
        "jobs_s": end["jobs"] * 1e9 / (last - end["first"]),
        "from_ready_s": (last - ready) / 1e9,
        "from_first_s": (last - end["first"]) / 1e9,
        **_grouped(end),
        "rss_mb": rss,
        "worker_cpu_s_per_100k": used.worker * per_100k,
        "db_cpu_s_per_100k": used.server * per_100k,
        "dead_tuples_per_100k": dead * per_100k,
        **_shares(used, took),
    }


def pick_up(
    server: Server,
    peer: Peer,
    jobs: int,
    seconds: float,
    gap_ms: tuple[float, float] = (10, 30),
    connections: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Row, list[tuple[float, float]]]:
    """Send jobs one by one from another process to a worker that waits for them.

    A sender that falls behind ends with the time, so that its rate shows it.

    Returns a row, and two figures for each job. The first is the second of its commit,
    counted from the first commit. The other is the milliseconds from there to the
    handler's first line.
    """
    chosen = peer.waiting if settings is None else settings
    with tempfile.TemporaryDirectory(prefix="jobs-lib-bench-") as folder:
        started, sent = Path(folder, "started"), Path(folder, "sent")
        with working(server, peer, chosen, log=str(started)) as worker:
            worker.await_event("ready", _START_SECONDS)
            skipped = _warm_up(server, peer, chosen, folder, started)
            before, began = read_usage(worker.process.pid, server.pid), time.monotonic()
            sender = run(
                server,
                peer,
                "send",
                jobs=jobs,
                seconds=seconds,
                gap_ms=gap_ms,
                connections=connections,
                log=str(sent),
                settings=dict(chosen),
            )
            await_finish(server, peer.unfinished, quietly=True)
            used = read_usage(worker.process.pid, server.pid) - before
            took = time.monotonic() - began
        points = join_logs(sent, started, skipped)
        commits = sent.read_text().count("\n")
    if not points:
        raise PieceError(f"{peer.name}: no job was picked up")
    waits = [wait for _, wait in points]
    row = {
        "sent": commits,
        "sent_s": commits / max(at for at, _ in points),
        "picked_up": len(points),
        "p50_ms": percentile(waits, 0.5),
        "p99_ms": percentile(waits, 0.99),
        **_shares(used, took, sender["client_cpu_s"]),
    }
    return row, points


def _warm_up(
    server: Server, peer: Peer, settings: Mapping[str, Any], folder: str, started: Path
) -> int:
    """Send a few jobs first, until the worker has started them.

    Returns how many bytes the worker has written into its log for them.
    """
    run(
        server,
        peer,
        "send",
        jobs=_WARM_UP_JOBS,
        seconds=_START_SECONDS,
        gap_ms=(5, 10),
        connections=1,
        log=str(Path(folder, "warm-up")),
        settings=dict(settings),
    )
    deadline = time.monotonic() + _START_SECONDS
    while True:
        written = started.read_bytes() if started.exists() else b""
        if written.count(b"\n") >= _WARM_UP_JOBS:
            return len(written)
        if time.monotonic() > deadline:
            raise PieceError(f"{peer.name}: the first jobs were not picked up")
        time.sleep(0.05)


def join_logs(sent: Path, started: Path, skipped: int = 0) -> list[tuple[float, float]]:
    """For each job the second of its commit, and the milliseconds until its start.

    Args:
        sent: the log of a sender.
        started: the log of a worker.
        skipped: how many bytes at the beginning of the worker's log to ignore.
    """
    starts: dict[int, int] = {}
    for line in started.read_text()[skipped:].splitlines():
        number, at = map(int, line.split())
        # For a job that ran twice, its first run is the pick-up.
        starts.setdefault(number, at)
    commits = [
        (int(committed), int(number))
        for number, _, committed in map(str.split, sent.read_text().splitlines())
    ]
    first = min(commits, default=(0, 0))[0]
    points = []
    for committed, number in commits:
        if number in starts:
            wait = max(0, starts[number] - committed) / 1e6
            points.append(((committed - first) / 1e9, wait))
    return points


def await_finish(server: Server, unfinished: str, *, quietly: bool = False) -> int:
    """Wait until the table has no unfinished job.

    Returns the moment in nanoseconds of the monotonic clock. It is the time of the
    question, since the answer may take long if an old snapshot keeps dead rows.
    """
    deadline = time.monotonic() + _FINISH_SECONDS
    with server.connect() as connection:
        while True:
            asked = time.monotonic_ns()
            row = connection.execute(unfinished.encode()).fetchone()
            if row is None or not row[0]:
                return asked
            if time.monotonic() > deadline:
                if quietly:
                    return asked
                raise PieceError(f"jobs are left after {_FINISH_SECONDS:g} s")
            time.sleep(0.01)


def _grouped(end: Row) -> Row:
    """How long the hot group and the small groups took, if there were any."""
    row: Row = {}
    if end.get("small_last"):
        row["small_s"] = (end["small_last"] - end["first"]) / 1e9
    if end.get("hot_last"):
        row["hot_jobs_s"] = end["hot"] * 1e9 / (end["hot_last"] - end["first"])
    return row


def _shares(used: Usage, took: float, sender: float = 0.0) -> Row:
    """How many cores each kind of process used, on average."""
    return {
        "worker_cpu": used.worker / took,
        "db_cpu": used.server / took,
        "other_cpu": max(0.0, used.other - sender) / took,
    }


def _children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system
