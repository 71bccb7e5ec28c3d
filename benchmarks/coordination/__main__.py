"""``python -m benchmarks.coordination``: claims, take-overs, folds and records.

All pieces run one after the other, on one broker and nothing else. It prints each piece
on stderr when it ends, and one JSON line at the end. The docstring of the package says
what each figure is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING

import click
from confluent_kafka import libversion

from benchmarks.bench import choose, rounded
from benchmarks.coordination import claims, consuming, folding, takeover
from benchmarks.coordination.bounds import find_missed
from benchmarks.coordination.stage import staged, tell
from jobs_lib import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.coordination.stage import Figures, Stage

MEASURES: dict[str, Callable[[Stage], Figures]] = {
    "claim": claims.measure_latency,
    "race": claims.measure_races,
    "takeover": takeover.measure,
    "fold": folding.measure_fold,
    "start": folding.measure_start,
    "bytes": folding.measure_bytes,
    "consume": consuming.measure_least_once,
    "batches": consuming.measure_most_once,
}


@click.command()
@click.option("--only", help=f"Measures, by commas: {', '.join(MEASURES)}.")
@click.option("--quick", is_flag=True, help="A small part of it: is all in order?")
def main(only: str | None, quick: bool) -> None:
    """Measure coordination over a topic of Kafka on this machine."""
    # The exit unwinds the stack, so that no broker or member is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures: Figures = {}
    failures: list[str] = []
    with staged(quick) as stage:
        for name in choose(only, MEASURES, "measure"):
            tell(f"=== {name}")
            try:
                figures |= MEASURES[name](stage)
            # A failure of one measure must not lose the rest of the run.
            except Exception:
                failures.append(name)
                tell(f"{name}: FAILED\n{traceback.format_exc()}")
    # A quick run measures too little to tell.
    missed = [] if quick else find_missed(figures)
    for one in missed:
        tell(one)
    result = {
        "benchmark": "coordination",
        "quick": quick,
        "jobs_lib": __version__,
        "librdkafka": libversion()[0],
        "cpus": os.cpu_count(),
        **rounded(figures),
        "failures": failures + missed,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(1 if failures or missed else 0)


if __name__ == "__main__":
    main()
