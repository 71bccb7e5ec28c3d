"""Jobs: this library and its peers alternate on one PostgreSQL with durable commits.

``python -m benchmarks.jobs`` prints each piece on stderr when it ends, and one JSON
line at the end. docs/measured.md says how to read it.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks import pieces
from benchmarks.bench import Bench, choose, rounded
from benchmarks.measures import MEASURES
from benchmarks.peers.install import refresh
from benchmarks.peers.peer import OURS, PEERS
from benchmarks.server import OPTIONS, Server


@click.command()
@click.option("--only", help=f"Measures, by commas: {', '.join(MEASURES)}.")
@click.option("--peers", help=f"Peers, by commas: {', '.join(PEERS)}. Default: all.")
@click.option("--rounds", default=3, show_default=True, help="Of each piece.")
@click.option("--quick", is_flag=True, help="A tenth of the jobs: is all in order?")
@click.option(
    "--held-seconds",
    type=int,
    help="How long the old transaction stays open. Default: 600, quick: 60.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("build/benchmarks"),
    show_default=True,
    help="The folder for curves.",
)
def main(
    only: str | None,
    peers: str | None,
    rounds: int,
    quick: bool,
    held_seconds: int | None,
    out: Path,
) -> None:
    """Measure the jobs on this machine."""
    # The exit unwinds the stack, so that no server or worker is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = choose(only, MEASURES, "measure")
    wanted = choose(peers, PEERS, "peer")
    refresh()
    here = {name: PEERS[name] for name in wanted if PEERS[name].installed}
    with Server() as server:
        bench = Bench(
            server,
            here,
            rounds=rounds,
            quick=quick,
            held_seconds=held_seconds or (60 if quick else 600),
            out=out,
        )
        if missing := [name for name in wanted if name not in here]:
            bench.tell(
                f"not installed, so not measured: {', '.join(missing)} "
                "(`python -m benchmarks.peers setup` installs them)"
            )
        header = _describe(bench, missing)
        bench.tell(json.dumps(header))
        figures: dict[str, Any] = {}
        for name in chosen:
            figures.update(bench.attempt_measure(name, MEASURES[name]))
    result = {
        **header,
        **rounded(figures),
        "noisy_rows": bench.noisy_rows,
        "failures": bench.failures,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(1 if bench.failures else 0)


def _describe(bench: Bench, missing: list[str]) -> dict[str, Any]:
    """The circumstances of the figures: what was measured, and how."""
    settings = pieces.run(bench.server, OURS, "settings")
    shown = {"workers", "batch", "poll_interval", "history_days"}
    return {
        "benchmark": "jobs",
        "quick": bench.quick,
        "rounds": bench.rounds,
        "jobs_lib": OURS.version,
        "jobs_lib_processes": 1,
        "jobs_lib_settings": {key: settings[key] for key in sorted(shown)},
        "peers": {
            name: {"version": peer.version, "drain": peer.drain}
            for name, peer in bench.peers.items()
        },
        "peers_missing": missing,
        "postgresql": bench.server.version,
        "postgresql_settings": OPTIONS,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
