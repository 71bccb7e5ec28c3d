"""``python -m benchmarks.relay``: rows a second, latency, order, an outage.

It prints each piece on stderr when it ends, and one JSON line at the end.
docs/measured.md says how to read it.
"""

from __future__ import annotations

import signal
import sys
from functools import partial
from typing import Any

import click
from confluent_kafka import libversion

from benchmarks.bench import Bench, choose
from benchmarks.relay.measures import MEASURES
from benchmarks.relay.stage import warm_up
from benchmarks.server import Server
from jobs_lib.devstack import KafkaBroker
from jobs_lib.devstack.kafka import FAST_JVM


@click.command()
@click.option("--only", help=f"By commas: {', '.join(MEASURES)}.")
@click.option("--rounds", default=3, show_default=True, help="Of each piece.")
@click.option("--quick", is_flag=True, help="A tenth of it: is all in order?")
def main(only: str | None, rounds: int, quick: bool) -> None:
    """Measure the relay on this machine."""
    # The exit unwinds the stack, so that no server or relay is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = choose(only, MEASURES, "measure")
    figures: dict[str, Any] = {}
    # Debezium reads the log, so all are measured with the log level that it needs.
    with (
        Server({"wal_level": "logical"}) as server,
        KafkaBroker.ephemeral(jvm=FAST_JVM) as broker,
    ):
        bench = Bench(server, {}, rounds=rounds, quick=quick)
        warm_up(server, broker, bench.size(6_000_000))
        for name in chosen:
            measure = partial(MEASURES[name], broker=broker)
            figures.update(bench.attempt_measure(name, measure))
        bench.report("relay", figures, librdkafka=libversion()[0])
    sys.exit(1 if bench.failures else 0)


if __name__ == "__main__":
    main()
