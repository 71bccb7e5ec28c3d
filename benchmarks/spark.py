"""Re-exports by Spark on this machine: `make bench-spark`. One JSON line at the end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import click

from benchmarks.bench import choose
from benchmarks.machine import find_children, peak_rss_mb
from benchmarks.reexports import loading, rates
from benchmarks.reexports.frames import measure_frames
from benchmarks.reexports.sizes import measure_sizes
from benchmarks.reexports.stage import Stage
from benchmarks.reexports.stale import measure_stale
from benchmarks.server import Server
from jobs_lib.devstack import KafkaBroker
from jobs_lib.devstack.kafka import FAST_JVM
from spark_bridge import open_session

if TYPE_CHECKING:
    from collections.abc import Callable

MASTER = "local[2,4]"


def measure_memory() -> dict[str, float | None]:
    """The most memory that the driver, its Java and the workers have used, in MiB."""
    found = {"java": 0.0, "workers": 0.0}
    for pid in find_family(os.getpid()):
        try:
            with open(f"/proc/{pid}/comm", encoding="utf-8") as file:
                name = "java" if file.read().startswith("java") else "workers"
            found[name] = max(found[name], peak_rss_mb(pid))
        except OSError:
            continue  # It has ended meanwhile.
    return {
        "driver_mb": peak_rss_mb(os.getpid()),
        "driver_java_mb": found["java"],
        "worker_mb": found["workers"],
    }


def find_family(pid: int) -> list[int]:
    """The children of a process and theirs, but none of the server."""
    found = []
    for child in find_children(pid):
        try:
            with open(f"/proc/{child}/comm", encoding="utf-8") as file:
                if file.read().startswith("postgres"):
                    continue
        except OSError:
            continue
        found += [child, *find_family(child)]
    return found


def measure_load(
    server: Server, _: KafkaBroker, *, quick: bool, jdbc: bool = True
) -> dict[str, Any]:
    """Plan and load a table of keys, by Spark and by others."""
    keys, rounds = (50_000, 1) if quick else (1_000_000, 3)
    jar = loading.find_jdbc() if jdbc else None
    settings = {} if jar is None else {"spark.jars": str(jar)}
    stage = Stage(server, keys)
    started = time.perf_counter()
    with open_session(MASTER, settings) as spark:
        figures: dict[str, Any] = {
            "session_s": time.perf_counter() - started,
            **loading.measure_load(stage, rounds),
            **measure_memory(),
            **loading.measure_bare(stage, spark, rounds, jdbc=jar is not None),
        }
    figures |= loading.measure_places(stage, rounds)
    figures |= loading.measure_plan(stage, 100_000 if quick else 10_000_000)
    return figures


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "load": measure_load,
    "stale": measure_stale,
    "frames": measure_frames,
    "sizes": measure_sizes,
    "rate": rates.measure_rate,
    "live": rates.measure_live,
    "start": rates.measure_start,
    "restart": rates.measure_restart,
}


@click.command()
@click.option("--only", help=f"By commas: {', '.join(MEASURES)}.")
@click.option("--quick", is_flag=True, help="A small part of it: is all in order?")
def main(only: str | None, quick: bool) -> None:
    """Measure re-exports on this machine."""
    warnings.simplefilter("ignore")
    # The exit unwinds the stack, so that no server or service is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures: dict[str, Any] = {}
    with Server() as server, KafkaBroker.ephemeral(jvm=FAST_JVM) as broker:
        for name in choose(only, MEASURES, "measure"):
            found = MEASURES[name](server, broker, quick=quick)
            sys.stderr.write(f"{name}: {found}\n")
            figures |= found
    rounded = {
        name: round(one, 3) if isinstance(one, float) else one
        for name, one in figures.items()
    }
    sys.stdout.write(json.dumps({"benchmark": "spark", "quick": quick, **rounded}))
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
