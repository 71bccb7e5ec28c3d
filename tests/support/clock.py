"""Clocks that stand still until a test moves them, and a clock that is wrong."""

from __future__ import annotations

import subprocess
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tests.support.waiting import wait_for

if TYPE_CHECKING:
    import psycopg


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
    shown = subprocess.run(
        ["faketime", "-m", "-f", f"{seconds:+}s", "printenv", "LD_PRELOAD"],
        check=True,
        capture_output=True,
        text=True,
    )
    return {
        "LD_PRELOAD": shown.stdout.strip(),
        "FAKETIME": f"{seconds:+}s",
        "DONT_FAKE_MONOTONIC": "1",
    }
