"""Live processes share the origins, over nothing but their heartbeats."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from jobs_lib.ownership.source import WatchingSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    import psycopg

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


class DatabaseSource(WatchingSource):
    """Shares origins with the other live processes of a role.

    An origin of a topic that some of them follow in Kafka is left to those: the others
    may not know its jobs, and would keep it from whoever is assigned it next.

    A process that is cut off from what its work needs leaves it to the others, if there
    are any.

    Never takes from a living owner: that one sees the same processes and releases.
    """

    def __init__(
        self,
        database: Database,
        process: Process,
        role: str,
        origins: Callable[[psycopg.Connection[Any]], Iterable[str]],
        *,
        interval: float,
        stale_after: float,
        is_cut_off: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(f"share {role}")
        self._role = role
        self._is_cut_off = is_cut_off
        self._database = database
        self._process = process
        self._origins = origins
        self._interval = interval
        self._parameters = {"role": role, "stale_after": stale_after}

    def _watch(self, answered: Callable[[], None]) -> None:
        with self._database.connect(self._name, impatient=True) as connection:
            while not self._stopping.is_set():
                # Their number may change: see `jobs-lib topics repartition`.
                origins = sorted(self._origins(connection))
                self.replace(self._choose(connection, origins))
                answered()
                self._stopping.wait(self._interval)

    def _choose(
        self, connection: psycopg.Connection[Any], origins: Iterable[str]
    ) -> list[str]:
        """Those of ``origins`` that are this process's share."""
        live: list[UUID] = []
        followers: defaultdict[str, list[UUID]] = defaultdict(list)
        query = self._database.queries["live_processes"]
        for process, topics in connection.execute(query, self._parameters):
            live.append(process)
            for topic in topics:
                followers[topic].append(process)
        others = [process for process in live if process != self._process.id]
        takes_part = not (others and self._is_cut_off())
        self._process.take_part(self._role, takes_part)
        if not takes_part:
            return []
        return [
            origin
            for origin in origins
            if choose_owner(origin, followers.get(origin.rpartition("/")[0], live))
            == self._process.id
        ]
