"""What every measure uses: the server, the peers, the sizes, the rounds."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks import pieces
from benchmarks.figures import best, median
from benchmarks.peers.peer import OURS
from jobs_lib import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.peers.peer import Peer
    from benchmarks.server import Server
    from benchmarks.worker import Row

Figures = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """The rows of one piece: one for each round that succeeded."""

    rows: list[Row] = field(default_factory=list)

    def median(self, key: str) -> float | None:
        """The median over the rounds; None if nothing was measured."""
        return median(row.get(key) for row in self.rows)


@dataclass
class Bench:
    """One run of the benchmark."""

    server: Server
    peers: dict[str, Peer]
    """The peers that are installed and asked for, without this library."""
    rounds: int = 3
    quick: bool = False
    held_seconds: int = 600
    """How long the measure `held_xmin` keeps its transaction open."""
    out: Path = Path("build/benchmarks")
    """The folder that curves are written to."""
    noisy_rows: int = 0
    failures: list[str] = field(default_factory=list)
    measure: str = ""
    """The measure that runs now."""

    def size(self, number: int, *, quick: int | None = None) -> int:
        """This number, or a tenth of it in a quick run."""
        if not self.quick:
            return number
        return number // 10 if quick is None else quick

    @property
    def everyone(self) -> dict[str, Peer]:
        """This library and the peers."""
        return {OURS.name: OURS, **self.peers}

    def alternate(
        self, pieces: Mapping[str, Callable[[], Row]], rounds: int | None = None
    ) -> dict[str, Rows]:
        """Run each piece once a round, in the opposite order in every other round."""
        found = {name: Rows() for name in pieces}
        for number in range(rounds or self.rounds):
            order = list(pieces)
            for name in order if number % 2 == 0 else reversed(order):
                row = self.attempt(name, pieces[name])
                if row is not None:
                    found[name].rows.append(row)
        return found

    def attempt(self, name: str, piece: Callable[[], Row]) -> Row | None:
        """Run a piece and print its row; return the row, or None if the piece fails."""
        try:
            row = piece()
        except Exception as error:
            # A failure of one peer must not lose the rest of a run that takes hours.
            self.failures.append(f"{self.measure}: {name}")
            self.tell(f"{name}: FAILED: {type(error).__name__}: {error}")
            return None
        self.noisy_rows += row.get("other_cpu", 0.0) > 0.3
        self.tell(f"{name}: {json.dumps(rounded(row))}")
        return row

    def attempt_measure(
        self, name: str, measure: Callable[[Bench], Figures]
    ) -> Figures:
        """The figures of a measure; none if the whole measure fails."""
        self.measure = name
        self.tell(f"=== {name}")
        try:
            return measure(self)
        except Exception:
            self.failures.append(name)
            self.tell(f"{name}: FAILED\n{traceback.format_exc()}")
            return {}

    def report(self, name: str, figures: Figures, **more: Any) -> None:
        """Print the one line of JSON at the end of a benchmark."""
        result = {
            "benchmark": name,
            "quick": self.quick,
            "rounds": self.rounds,
            "jobs_lib": __version__,
            "postgresql": self.server.version,
            "cpus": os.cpu_count(),
            **more,
            **rounded(figures),
            "failures": self.failures,
        }
        sys.stdout.write(json.dumps(result) + "\n")

    def tell(self, line: str) -> None:
        """Print a line for people, with the time."""
        print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)

    def prepare(
        self, peer: Peer, jobs: int, mode: str = "plain", setup: Any = None
    ) -> None:
        """Restore the database with this many jobs: the same one in every round."""
        name = f"{peer.name}_{mode}_{jobs}"
        if not self.server.keeps(name):
            self.renew(peer, setup)
            pieces.run(self.server, peer, "bulk", jobs=jobs, mode=mode)
            self.server.keep(name)
        self.server.restore(name)

    def renew(self, peer: Peer, setup: Any = None) -> None:
        """Make the database anew, with the peer's tables and no jobs."""
        self.server.renew()
        pieces.run(self.server, peer, "setup", **(setup or {}))
        self.server.settle()

    def best_peer(
        self, rows: Mapping[str, Rows], key: str, *, lowest: bool = False
    ) -> tuple[str, float] | None:
        """The peer with the best value of a figure."""
        return best({p: rows[p].median(key) for p in self.peers}, lowest=lowest)


def choose(given: str | None, known: Any, kind: str) -> list[str]:
    """The names that an option lists, by commas; all of them if it is not given."""
    names = list(known) if given is None else [n for n in given.split(",") if n]
    for name in names:
        if name not in known:
            raise click.BadParameter(
                f"there is no {kind} {name!r}: they are {', '.join(known)}"
            )
    return names


def rounded(value: Any) -> Any:
    """Round figures for people: three digits after the point, fewer if large."""
    if isinstance(value, float):
        return round(value) if abs(value) >= 1_000 else round(value, 3)
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return value
