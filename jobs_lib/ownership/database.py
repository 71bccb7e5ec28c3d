"""Live processes share the origins, over nothing but their heartbeats."""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.ownership.source import Assignment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from jobs_lib.db import Database
    from jobs_lib.ownership.process import Process


def choose_owner(origin: str, processes: Iterable[UUID]) -> UUID | None:
    """The process that owns ``origin``: the same everywhere, with few moves.

    Rendezvous hashing (Thaler and Ravishankar, "A Name-Based Mapping Scheme for
    Rendezvous", 1996): the highest of the hashes of (process, origin).
    """

    def weight(process: UUID) -> bytes:
        return hashlib.blake2b(process.bytes + origin.encode(), digest_size=8).digest()

    return max(processes, key=weight, default=None)


class DatabaseSource:
    """Shares origins with the other live processes of a role.

    Never takes from a living owner: that one sees the same processes and releases.
    """

    def __init__(
        self,
        database: Database,
        process: Process,
        role: str,
        origins: Callable[[], Iterable[str]],
        *,
        interval: float,
        stale_after: float,
    ) -> None:
        self._database = database
        self._process = process
        self._role = role
        self._origins = origins
        self._interval = interval
        self._stale_after = stale_after
        self._assignment = Assignment()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name=f"jobs_lib share {role}", daemon=True
        )
        self._changed: Callable[[], None] = lambda: None

    def start(self, changed: Callable[[], None]) -> None:
        """Start to watch who lives."""
        self._changed = changed
        self._thread.start()

    def stop(self) -> None:
        """Want nothing more."""
        self._stopping.set()
        self._thread.join()
        self._assignment.replace(())

    @property
    def wanted(self) -> frozenset[str]:
        """This process's share."""
        return self._assignment.wanted

    def claims(self, origins: Iterable[str]) -> frozenset[str]:
        """None, ever."""
        return self._assignment.claims(origins)

    def took(self, origins: Iterable[str]) -> None:
        """These were taken over."""
        self._assignment.took(origins)

    def _watch(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                with self._database.connect(f"share {self._role}") as connection:
                    origins = sorted(self._origins())
                    while not self._stopping.is_set():
                        rows = connection.execute(
                            self._database.queries["live_processes"],
                            {"role": self._role, "stale_after": self._stale_after},
                        ).fetchall()
                        self._share(origins, [row[0] for row in rows])
                        failures = 0
                        self._stopping.wait(self._interval)
            except Exception as error:
                failures += 1
                telemetry.emit("loop.failed", loop="share", error=error)
                self._stopping.wait(RECONNECT.delay(failures))

    def _share(self, origins: list[str], processes: list[UUID]) -> None:
        mine = (o for o in origins if choose_owner(o, processes) == self._process.id)
        if self._assignment.replace(mine):
            self._changed()
