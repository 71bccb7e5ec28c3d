"""The consumers that are measured side by side, and how each is started."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.connect import SINK
from benchmarks.peers.install import CONSUMERS_PYTHON
from benchmarks.peers.peer import REPOSITORY
from jobs_lib import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

LOOPS = "benchmarks.consume.loops"
_HERE = REPOSITORY / "benchmarks" / "consume"
_OURS = ("-m", "jobs_lib.cli", "run", "benchmarks.consume.service:app")


@dataclass(frozen=True)
class Peer:
    """A program that reads a topic into a table."""

    name: str
    command: tuple[str, ...]
    """Its command line; empty for Kafka Connect, whose settings are files."""
    version: str = ""
    """The version of a library; empty for a loop."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables of its environment."""
    idle: Mapping[str, str] = field(default_factory=dict)
    """More of them where the measure is how soon a record can be seen."""
    deletes: bool = True
    """Whether a tombstone removes the row."""
    drain_share: float = 1.0
    """Which share of a drain's records it gets: a slow one would take minutes."""

    @property
    def installed(self) -> bool:
        """Whether ``python -m benchmarks.peers setup`` has installed it."""
        if not self.command:
            return SINK.installed
        return self.command[0] == sys.executable or CONSUMERS_PYTHON.exists()


def _ours(kind: str) -> Peer:
    return Peer(kind, (sys.executable, *_OURS), __version__, {"BENCH_KIND": kind})


def _resync(kind: str, *more: str) -> Peer:
    command = ("readmodel", "resync", "benchmarks.consume.service:app", "aircraft_rm")
    return Peer(
        "resync",
        (sys.executable, "-m", "jobs_lib.cli", *command, *more),
        __version__,
        {"BENCH_KIND": kind},
    )


def _loop(name: str, module: str, *more: str, share: float = 1.0) -> Peer:
    command = (sys.executable, "-m", f"{LOOPS}.{module}", *more)
    return Peer(name, command, drain_share=share)


def _installed(module: str, *more: str) -> tuple[str, ...]:
    return str(CONSUMERS_PYTHON), "-m", f"{LOOPS}.{module}", *more


def _find_version(file: str, pattern: str) -> str:
    found = re.search(pattern, (_HERE / file).read_text(encoding="utf-8"))
    if found is None:
        raise LookupError(f"{file} has nothing like {pattern}")
    return found[1]


def _pin(package: str) -> str:
    pattern = rf"(?m)^{re.escape(package)}(?:\[\w+\])?==([\d.]+)"
    return _find_version("requirements.txt", pattern)


READ_MODEL = _ours("read_model")
HANDLER = _ours("handler")
BLOCK_HANDLER = _ours("block_handler")
GATED_HANDLER = _ours("gated_handler")
TWO_VERSIONS = _ours("two_versions")
RESYNC = _resync("read_model")
SLOW_RESYNC = {
    count: _resync("slow_read_model", "--processes", str(count)) for count in (1, 4)
}
"""Re-synchronise the read model; by a number of processes where each row waits."""
INSERT_LOOP = _loop("insert_loop", "batch", "insert")
"""Inserts a row for each record, as the handlers do."""
EXECUTE_LOOP = _loop("execute_loop", "batch", "execute")
"""The same by a statement for each record."""
BRIDGE = {part: _loop(f"bridge_{part}", "bridge", part) for part in ("relay", "read")}
"""An outbox's relay, and the reader of its topic."""

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "debezium_sink",
            (),
            _find_version(
                "debezium/pom.xml", r"debezium-connector-jdbc</\w+>\s*<version>([^<]+)"
            ),
        ),
        _loop("unnest_loop", "unnest"),
        _loop("copy_loop", "copy"),
        _loop("batch_loop", "batch"),
        _loop("each_loop", "each", share=0.1),
        Peer(
            "quix",
            _installed("quix_"),
            _pin("quixstreams"),
            # It writes nothing before it commits.
            idle={"BENCH_COMMIT_SECONDS": "0.01"},
            deletes=False,
        ),
        Peer("faststream", _installed("faststream_"), _pin("faststream")),
        Peer(
            "faust",
            _installed("faust_", "worker", "-l", "warn"),
            _pin("faust-streaming"),
            drain_share=0.2,
        ),
    )
}
PACKAGED = ("quix", "faststream", "faust", "debezium_sink")
"""The peers that are libraries or programs: those that are killed, beside ours."""
