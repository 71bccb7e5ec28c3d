"""The peers: how each is called, and the settings with which it is fastest.

The settings come from short runs of each peer alone on 2 cores. If no single choice is
best at everything, a peer gets the best one for each measure. This library gets its
defaults for all.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.peers.install import FOLDER, HERE, NODE, PYTHON, RIVER
from jobs_lib import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

REPOSITORY = HERE.parents[1]


@dataclass(frozen=True)
class Peer:
    """A library that runs jobs, and its adapter."""

    name: str
    command: tuple[str, ...]
    version: str
    unfinished: str
    """A query for any job that has not ended."""
    drain: Mapping[str, Any] = field(default_factory=dict)
    """The settings of a worker that has much to do."""
    idle: Mapping[str, Any] | None = None
    """The settings of a worker that waits for jobs. Defaults to those of ``drain``."""
    groups: Mapping[str, Any] | None = None
    """The settings of a worker that keeps groups in order; None if it has no groups."""
    groups_setup: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of ``setup`` for groups."""

    @property
    def installed(self) -> bool:
        """Whether ``python -m benchmarks.peers setup`` has installed it."""
        return all(
            _exists(part) for part in self.command if part.startswith(str(FOLDER))
        )

    @property
    def waiting(self) -> Mapping[str, Any]:
        """Settings of a worker that waits for jobs."""
        return self.drain if self.idle is None else self.idle


def _exists(path: str) -> bool:
    return FOLDER.joinpath(path).exists()


def _pin(file: Path, name: str) -> str:
    """The version that a list of packages asks for."""
    found = re.search(
        rf'^\W*{re.escape(name)}\W*[=:v ]+"?([\d.]+)', file.read_text(), re.M
    )
    if found is None:
        raise LookupError(f"{file} does not name {name}")
    return found[1]


_REQUIREMENTS = HERE / "requirements.txt"
_PACKAGES = HERE / "node" / "package.json"
_MODULES = HERE / "river" / "go.mod"


def _node(script: str) -> tuple[str, ...]:
    return str(NODE), str(FOLDER / "node" / script)


OURS = Peer(
    "jobs_lib",
    (sys.executable, "-m", "benchmarks.peers.jobs_lib_"),
    __version__,
    "select exists (select from jobs_lib.jobs)",
    groups={},
)

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "graphile",
            _node("graphile.mjs"),
            _pin(_PACKAGES, "graphile-worker"),
            "select exists (select from graphile_worker._private_jobs)",
            drain={
                "concurrentJobs": 100,
                "localQueue": 2_000,
                "refetchDelayMs": 10,
                "completeDelayMs": 50,
            },
            # Its local queue adds latency, and takes one job of a group at a time.
            idle={"concurrentJobs": 24},
            groups={"concurrentJobs": 24},
        ),
        Peer(
            "river",
            (str(RIVER),),
            _pin(_MODULES, "github.com/riverqueue/river"),
            "select exists (select from river_job"
            " where state in ('available', 'running'))",
            drain={
                "maxWorkers": 2_000,
                "fetchCooldownMs": 2,
                "fetchPollMs": 20,
                "pool": 10,
            },
        ),
        Peer(
            "pgqueuer",
            (str(PYTHON), "-m", "benchmarks.peers.pgqueuer_"),
            _pin(_REQUIREMENTS, "pgqueuer"),
            "select exists (select from pgqueuer)",
            drain={"batch_size": 1_000, "pool": 4},
        ),
        Peer(
            "procrastinate",
            (str(PYTHON), "-m", "benchmarks.peers.procrastinate_"),
            _pin(_REQUIREMENTS, "procrastinate"),
            "select exists (select from procrastinate_jobs"
            " where status in ('todo', 'doing'))",
            drain={"concurrency": 10, "delete_jobs": "always"},
            groups={"concurrency": 10, "delete_jobs": "always"},
        ),
        Peer(
            "pgboss",
            _node("pgboss.mjs"),
            _pin(_PACKAGES, "pg-boss"),
            "select exists (select from pgboss.job where state < 'completed')",
            drain={
                "useListenNotify": True,
                "batchSize": 1_000,
                "localConcurrency": 2,
                "pollingIntervalSeconds": 0.5,
                "burstWhenBatchFull": True,
            },
            # With notifications it stops after one round of the groups.
            groups={
                "useListenNotify": False,
                "batchSize": 1_000,
                "localConcurrency": 1,
                "pollingIntervalSeconds": 0.5,
                "burstWhenBatchFull": True,
                "burstWhenReadyExceeds": 1,
            },
            groups_setup={"policy": "key_strict_fifo"},
        ),
    )
}


def argv(peer: Peer, command: str, given: Mapping[str, Any]) -> list[str]:
    """The command line of an adapter."""
    return [*peer.command, command, json.dumps(given)]
