"""Whether more jobs than a limit allows ever run at once while processes are killed."""

from __future__ import annotations

import random
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import pieces
from benchmarks.peers.limited import EVENT
from benchmarks.peers.peer import OURS
from benchmarks.worker import PieceError, Worker

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.worker import Row

_PROCESSES = 3
_KILL_SECONDS = 4.0
_LONGEST = 900.0
_SETTINGS = {"stale_after": 2.0, "heartbeat_interval": 0.3, "workers": 4}
_LEFT = "select exists (select from jobs_lib.jobs)"


def measure(bench: Bench) -> Figures:
    """Start 1,000,000 jobs on three processes; kill one every four seconds.

    Half of the jobs are of a type that may run three at once. The others are of a type
    that may run two at once for each of 50 tenants.
    """
    jobs = bench.size(500_000)
    figures: Figures = {"over_the_limit": 0, "limited_starts": 0, "limited_kills": 0}
    limits: list[Any] = [3, [2, "tenant"]]
    for limit in limits:
        row = bench.attempt(f"limit of {limit}", partial(_run, bench, jobs, limit))
        if row is None:
            return {}
        figures["over_the_limit"] += row["over"]
        figures["limited_starts"] += row["starts"]
        figures["limited_kills"] += row["kills"]
    bench.server.forget()
    return figures


def _run(bench: Bench, jobs: int, limit: Any) -> Row:
    bench.renew(OURS)
    pieces.run(bench.server, OURS, "fill_limited", jobs=jobs, limit=limit)
    with tempfile.TemporaryDirectory(prefix="jobs-lib-bench-") as folder:
        logs = (Path(folder, str(n)) for n in range(1_000_000))
        running: dict[Path, Worker] = {}
        ended: dict[Path, int] = {}

        def start() -> None:
            log = next(logs)
            # The process may be killed before its first job.
            log.touch()
            running[log] = Worker(
                bench.server,
                OURS,
                _SETTINGS,
                command="work_limited",
                log=str(log),
                limit=limit,
            )

        began = killed_at = time.monotonic()
        try:
            for _ in range(_PROCESSES):
                start()
            while bench.server.ask(_LEFT):
                if time.monotonic() - began > _LONGEST:
                    raise PieceError(f"jobs are left after {_LONGEST:g} s")
                time.sleep(0.2)
                if time.monotonic() - killed_at > _KILL_SECONDS:
                    killed_at = time.monotonic()
                    log = random.choice([*running])
                    worker = running.pop(log)
                    worker.process.kill()
                    worker.process.wait()
                    ended[log] = time.monotonic_ns()
                    worker.end()
                    start()
        finally:
            for worker in running.values():
                worker.end()
        kills = len(ended)
        ended |= dict.fromkeys(running, time.monotonic_ns())
        return {
            **_count(ended, limit),
            "kills": kills,
            "seconds": time.monotonic() - began,
        }


def _count(ended: dict[Path, int], limit: Any) -> Row:
    """Count the starts, and the starts that were too many."""
    most, by_tenant = (limit[0], True) if isinstance(limit, list) else (limit, False)
    events: dict[int, list[tuple[int, int]]] = defaultdict(list)
    starts = 0
    for log, end in ended.items():
        open_starts: dict[int, int] = defaultdict(int)
        for is_start, tenant, at in EVENT.iter_unpack(log.read_bytes()):
            value = tenant if by_tenant else 0
            change = 1 if is_start else -1
            starts += is_start
            open_starts[value] += change
            events[value].append((at, change))
        for value, count in open_starts.items():
            # A job whose process was killed ran until then.
            events[value] += [(end, -1)] * count
    over = 0
    for changes in events.values():
        now = 0
        for _, change in sorted(changes):
            now += change
            over += change > 0 and now > most
    return {"starts": starts, "over": over}
