"""The time of each step of a pick-up: medians, and that of the least possible step."""

from __future__ import annotations

import random
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import pieces
from benchmarks.figures import percentile
from benchmarks.peers.peer import OURS
from benchmarks.peers.steps import STEPS
from benchmarks.worker import working

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.worker import Row

_SECONDS = 120.0
_GAP_MS = (10, 30)


def measure(bench: Bench) -> Figures:
    """Pick up 500 jobs, and send ``select 1`` as often on an idle connection."""
    rows = bench.alternate(
        {
            "steps": partial(pick_up, bench),
            "select 1": partial(ask_nothing, bench),
        }
    )
    figures = {
        f"pickup_until_{step}_ms": rows["steps"].median(f"{step}_ms") for step in STEPS
    }
    return {**figures, "idle_select_1_ms": rows["select 1"].median("p50_ms")}


def pick_up(bench: Bench) -> Row:
    """Milliseconds of each step, from the end of the step before."""
    bench.renew(OURS)
    jobs = bench.size(500, quick=100)
    with tempfile.TemporaryDirectory(prefix="jobs-lib-bench-") as folder:
        steps, sent = Path(folder, "steps"), Path(folder, "sent")
        with working(bench.server, OURS, OURS.waiting, steps=str(steps)) as worker:
            worker.await_event("ready", _SECONDS)
            pieces.run(
                bench.server,
                OURS,
                "send",
                jobs=jobs,
                seconds=_SECONDS,
                gap_ms=_GAP_MS,
                connections=1,
                log=str(sent),
            )
            pieces.await_finish(bench.server, OURS.unfinished)
        waits: list[list[float]] = [[] for _ in STEPS]
        commits = dict(map(_read, sent.read_text().splitlines()))
        # Jobs that came while the worker took its origins had no hint.
        for line in steps.read_text().splitlines()[jobs // 10 :]:
            number, *times = map(int, line.split())
            way = [commits[number], *times]
            if way == sorted(way):
                for wait, (before, after) in zip(waits, pairwise(way), strict=True):
                    wait.append((after - before) / 1e6)
    return {
        "jobs": len(waits[0]),
        **{
            f"{step}_ms": percentile(wait, 0.5)
            for step, wait in zip(STEPS, waits, strict=True)
        },
    }


def ask_nothing(bench: Bench) -> Row:
    """A round trip to a session that has been silent, as the executor's was."""
    waits = []
    with bench.server.connect() as connection:
        for _ in range(bench.size(500, quick=100)):
            time.sleep(random.uniform(*_GAP_MS) / 1e3)
            began = time.perf_counter()
            connection.execute("select 1", prepare=True)
            waits.append(1e3 * (time.perf_counter() - began))
    return {"p50_ms": percentile(waits, 0.5)}


def _read(line: str) -> tuple[int, int]:
    number, _, committed = line.split()
    return int(number), int(committed)
