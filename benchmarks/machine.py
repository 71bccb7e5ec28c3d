"""The CPU and memory that processes have used, as Linux counts it in /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """Seconds of CPU since the start of a worker, of a server, and of the machine."""

    worker: float
    server: float
    harness: float
    machine: float

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(
            self.worker - earlier.worker,
            self.server - earlier.server,
            self.harness - earlier.harness,
            self.machine - earlier.machine,
        )

    @property
    def other(self) -> float:
        """The CPU of processes that have no part in the measurement."""
        return max(0.0, self.machine - self.worker - self.server - self.harness)


def read_usage(worker: int | None, server: int) -> Usage:
    """Read the counters now.

    Args:
        worker: the measured process, together with its children; None while there is no
            worker.
        server: the first process of PostgreSQL.
    """
    own = os.times()
    return Usage(
        worker=_family_cpu(worker) if worker else 0.0,
        server=_family_cpu(server),
        harness=own.user + own.system,
        machine=_machine_cpu(),
    )


def peak_rss_mb(pid: int) -> float:
    """The most memory that a process has ever used, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def find_children(parent: int) -> list[int]:
    """The processes that a process has started."""
    every = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in every if _cpu(pid)[2] == parent]


def _family_cpu(parent: int) -> float:
    """The CPU of a process, its children, and the ended children of those."""
    return sum(sum(_cpu(pid)[:2]) for pid in (parent, *find_children(parent)))


def _cpu(pid: int) -> tuple[float, float, int]:
    """The CPU seconds of a process and of its ended children, and its parent."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0.0, 0
    # The name in parentheses may hold any text, even blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    ticks = [int(field) for field in fields[11:15]]
    return (ticks[0] + ticks[1]) / _HZ, (ticks[2] + ticks[3]) / _HZ, int(fields[1])


def _machine_cpu() -> float:
    with Path("/proc/stat").open() as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / _HZ
