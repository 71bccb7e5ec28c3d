"""``python -m benchmarks.consume``: consumers side by side, from a topic to a table.

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
from benchmarks.consume.drain import (
    measure_drain,
    measure_gate,
    measure_handler,
    measure_memory,
)
from benchmarks.consume.kills import measure_kills
from benchmarks.consume.latency import measure_databases, measure_visible
from benchmarks.consume.peers import PEERS
from benchmarks.consume.resync import measure_resync, measure_verify
from benchmarks.consume.stage import Stage
from benchmarks.consume.switch import measure_switch
from benchmarks.consume.where import measure_where
from benchmarks.server import OPTIONS, Server
from jobs_lib.devstack import KafkaBroker
from jobs_lib.devstack.kafka import FAST_JVM

MEASURES = {
    "drain": measure_drain,
    "handler": measure_handler,
    "gate": measure_gate,
    "visible": measure_visible,
    "databases": measure_databases,
    "memory": measure_memory,
    "kills": measure_kills,
    "where": measure_where,
    "resync": measure_resync,
    "verify": measure_verify,
    "switch": measure_switch,
}


@click.command()
@click.option("--only", help=f"Measures, by commas: {', '.join(MEASURES)}.")
@click.option("--peers", help=f"Peers, by commas: {', '.join(PEERS)}. Default: all.")
@click.option("--rounds", default=3, show_default=True, help="Of each piece.")
@click.option("--quick", is_flag=True, help="A tenth of it: is all in order?")
def main(only: str | None, peers: str | None, rounds: int, quick: bool) -> None:
    """Measure consumers on this machine."""
    # The exit unwinds the stack, so that no server or consumer is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = choose(only, MEASURES, "measure")
    wanted = choose(peers, PEERS, "peer")
    here = {name: PEERS[name] for name in wanted if PEERS[name].installed}
    figures: dict[str, Any] = {}
    with Server() as server, KafkaBroker.ephemeral(jvm=FAST_JVM) as broker:
        bench = Bench(server, {}, rounds=rounds, quick=quick)
        stage = Stage(server, broker, here)
        if missing := [name for name in wanted if name not in here]:
            bench.tell(
                f"not installed, so not measured: {', '.join(missing)} "
                "(`python -m benchmarks.peers setup` installs them)"
            )
        for name in chosen:
            measure = partial(MEASURES[name], stage=stage)
            figures.update(bench.attempt_measure(name, measure))
        bench.report(
            "consume",
            figures,
            librdkafka=libversion()[0],
            postgresql_settings=OPTIONS,
            peers={name: peer.version for name, peer in here.items() if peer.version},
            peers_missing=missing,
            noisy_rows=bench.noisy_rows,
        )
    sys.exit(1 if bench.failures else 0)


if __name__ == "__main__":
    main()
