"""``python -m benchmarks.ownership``: take-overs, rebalances, zombies, executors.

It prints each piece on stderr when it ends, and one JSON line at the end.
docs/measured.md says how to read it.
"""

from __future__ import annotations

import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from confluent_kafka import libversion

from benchmarks.bench import Bench, choose
from benchmarks.ownership import rebalances, scaling, takeover, zombies
from benchmarks.ownership.pods import QUICK
from benchmarks.server import Server
from jobs_lib.devstack import KafkaBroker

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.bench import Figures


@click.command()
@click.option("--only", help="Measures, by commas. Default: all.")
@click.option("--rounds", default=3, show_default=True, help="Of each piece.")
@click.option("--quick", is_flag=True, help="A tenth of it: is all in order?")
def main(only: str | None, rounds: int, quick: bool) -> None:
    """Measure ownership on this machine."""
    # The exit unwinds the stack, so that no server or pod is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Server() as server, KafkaBroker.ephemeral() as broker:
        bench = Bench(server, {}, rounds=rounds, quick=quick)
        measures: dict[str, Callable[[Bench], Figures]] = {
            "takeover": partial(takeover.measure, broker=broker),
            "in_flight": partial(takeover.measure_in_flight, broker=broker),
            "follow": partial(rebalances.measure_follow, broker=broker),
            "pauses": partial(rebalances.measure_pauses, broker=broker),
            "zombies": partial(zombies.measure, broker=broker),
            "scaling": scaling.measure,
        }
        chosen = choose(only, measures, "measure")
        figures: dict[str, Any] = {}
        for name in chosen:
            figures.update(bench.attempt_measure(name, measures[name]))
        more = {"settings": QUICK, "librdkafka": libversion()[0]}
        bench.report("ownership", figures, **more)
    sys.exit(1 if bench.failures else 0)


if __name__ == "__main__":
    main()
