"""Clocks that stand still until a test moves them, and a clock that is wrong."""

from __future__ import annotations

import shutil
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.waiting import wait_for

if TYPE_CHECKING:
    import psycopg

HAS_FAKETIME = shutil.which("faketime") is not None
NEEDS_FAKETIME = pytest.mark.skipif(not HAS_FAKETIME, reason="needs faketime")


class Clock:
    """Stands for the module `time`: seconds that the test sets.

    Args:
        now: what it shows at first.
    """

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        """The seconds that it shows."""
        return self.now


class FakeClock:
    """The time of all schedulers of a test, and the schedulers that wait for it."""

    def __init__(self, now: datetime) -> None:
        self.time = now.astimezone(UTC)
        self._changed = threading.Condition()
        self._waiting: dict[threading.Thread, datetime] = {}

    def now(self, connection: psycopg.Connection[Any]) -> datetime:
        """The time that the test has set."""
        return self.time

    def wait(self, stopping: threading.Event, seconds: float) -> None:
        """Wait until the test has moved the clock that far."""
        me = threading.current_thread()
        with self._changed:
            until = self.time + timedelta(seconds=seconds)
            self._waiting[me] = until
            self._changed.notify_all()
            while self.time < until and not stopping.is_set():
                self._changed.wait(0.02)
            del self._waiting[me]

    def set(self, now: datetime) -> None:
        """Set the clock; schedulers that waited for this time then look."""
        with self._changed:
            self.time = now.astimezone(UTC)
            self._changed.notify_all()

    def settle(self, schedulers: int) -> None:
        """Wait until this many schedulers wait for a time that is still ahead."""

        def all_wait() -> bool:
            with self._changed:
                ahead = [at for at in self._waiting.values() if at > self.time]
                return len(ahead) == schedulers

        wait_for(all_wait, what=f"{schedulers} schedulers wait for the clock")


def faketime(seconds: int) -> dict[str, str]:
    """The environment in which the clock of a process is wrong by some seconds."""
    return {
        "LD_PRELOAD": _find_faketime(),
        "FAKETIME": f"{seconds:+}s",
        "DONT_FAKE_MONOTONIC": "1",
    }


def faketime_by(file: Path) -> dict[str, str]:
    """The environment in which a file says how wrong the clock of a process is.

    Write it with `set_faketime`. The process reads it once a second. Clocks of elapsed
    time stay right, and so do the times of files, which Python compares, and the clock
    of Kafka's client: see `tests/support/faketime`.
    """
    here = Path(__file__).parent
    return {
        "LD_PRELOAD": _find_faketime(),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "1",
        # By version it is the one or the other.
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        # Else waits by the clock of elapsed time end too early, and begin anew without
        # a pause: a quarter of a processor for each process.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        "PYTHONPATH": f"{here / 'faketime'}:{here.parents[1]}",
    }


def set_faketime(file: Path, seconds: int) -> None:
    """Write by how many seconds a clock is wrong. Nobody reads half of it."""
    new = file.with_suffix(".new")
    new.write_text(f"{seconds:+}\n", encoding="ascii")
    new.replace(file)


def clear_faketime(pid: int) -> None:
    """Remove what libfaketime leaves in shared memory when its process is killed."""
    for name in ("faketime_shm", "sem.faketime_sem"):
        Path(f"/dev/shm/{name}_{pid}").unlink(missing_ok=True)


@cache
def _find_faketime() -> str:
    """Find the library that a process is to load.

    The program fails where it gets the id of a process that was killed with this
    library: what that one has left is in its way. The next try has another id.
    """
    command = ["faketime", "-m", "-f", "+0s", "printenv", "LD_PRELOAD"]
    failures: list[str] = []

    def ask() -> str | None:
        shown = subprocess.run(command, check=False, capture_output=True, text=True)
        failures.append(shown.stderr)
        return shown.stdout.strip() if shown.returncode == 0 else None

    return wait_for(ask, what=lambda: f"faketime names it: {failures[-1]}") or ""
