"""Re-exports by Spark on this machine: `make bench-spark`. One JSON line at the end."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings

import click

from benchmarks.machine import find_children, peak_rss_mb
from benchmarks.reexports import loading
from benchmarks.reexports.stage import Stage
from spark_bridge import open_session

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


@click.command()
@click.option("--keys", default=1_000_000, show_default=True, help="Keys of the table.")
@click.option("--rounds", default=3, show_default=True, help="Runs of each piece.")
@click.option("--quick", is_flag=True, help="A small part of it: is all in order?")
@click.option("--jdbc/--no-jdbc", default=True, help="Compare with Spark's own writer.")
def main(keys: int, rounds: int, quick: bool, jdbc: bool) -> None:
    """Measure planning and loading on this machine."""
    keys, rounds = (50_000, 1) if quick else (keys, rounds)
    jar = loading.find_jdbc() if jdbc else None
    settings = {} if jar is None else {"spark.jars": str(jar)}
    warnings.simplefilter("ignore")
    with Stage(keys) as stage:
        started = time.perf_counter()
        with open_session(MASTER, settings) as spark:
            figures: dict[str, float | None] = {
                "session_s": time.perf_counter() - started,
                **loading.measure_load(stage, rounds),
                **measure_memory(),
                **loading.measure_bare(stage, spark, rounds, jdbc=jar is not None),
            }
        figures |= loading.measure_places(stage, rounds)
        figures |= loading.measure_plan(stage, 100_000 if quick else 10_000_000)
    rounded = {name: one and round(one, 3) for name, one in figures.items()}
    line = {"benchmark": "spark", "keys": keys, "rounds": rounds, **rounded}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
