"""Live processes share the origins, by their heartbeats alone."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jobs_lib.ownership.source import WatchingSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    import psycopg

    from jobs_lib.ownership.process import Process
    from jobs_lib.postgres.database import Database


def choose_owner(origin: str, processes: Iterable[UUID]) -> UUID | None:
    """Choose the owner of ``origin``: all processes agree, and few origins move.

    Rendezvous hashing (Thaler and Ravishankar, "A Name-Based Mapping Scheme for
    Rendezvous", 1996): the process with the highest hash of (process, origin) wins.
    """
    return max(processes, key=lambda process: _weigh(process, origin), default=None)


@lru_cache(maxsize=64)
def share_evenly(
    origins: tuple[str, ...], processes: tuple[UUID, ...]
) -> dict[str, UUID]:
    """Choose the owner of each origin so that no process has two more than another.

    Rendezvous hashing with bounded loads: pairs of (process, origin) are taken from the
    highest hash down, while the process has room. When a process comes or goes, hardly
    more origins move than must.
    """
    if not processes:
        return {}
    least, larger = divmod(len(origins), len(processes))
    owners: dict[str, UUID] = {}
    loads: Counter[UUID] = Counter()
    pairs = ((_weigh(p, origin), origin, p) for p in processes for origin in origins)
    for _, origin, process in sorted(pairs, reverse=True):
        if origin in owners or loads[process] >= least + (larger > 0):
            continue
        larger -= loads[process] == least
        loads[process] += 1
        owners[origin] = process
    return owners


def _weigh(process: UUID, origin: str) -> bytes:
    return hashlib.blake2b(process.bytes + origin.encode(), digest_size=8).digest()


class DatabaseSource(WatchingSource):
    """Shares origins with the other live processes of a role.

    Lasting origins are shared evenly. Passing origins, which come and go with their
    jobs, are assigned one by one: none moves because another one came, and processes
    that see different sets at a time agree about the origins that both see.

    If some processes follow an origin's topic in Kafka, only those share it: the others
    may not know its jobs, and would keep it from the process that is assigned it next.

    A process that is cut off from what its work needs leaves the origins to the others,
    if there are any.

    It never takes from a living owner: that process sees the same and releases.
    """

    def __init__(
        self,
        database: Database,
        process: Process,
        role: str,
        lasting: Callable[[psycopg.Connection[Any]], Iterable[str]],
        passing: Callable[[psycopg.Connection[Any]], Iterable[str]] = lambda _: (),
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
        self._lasting = lasting
        self._passing = passing
        self._interval = interval
        self._parameters = {"role": role, "stale_after": stale_after}

    def _watch(self) -> Iterator[None]:
        with self._database.connect(self._name, impatient=True) as connection:
            while not self._loop.stopping.is_set():
                self.replace(self._choose(connection))
                yield
                self._loop.stopping.wait(self._interval)

    def _choose(self, connection: psycopg.Connection[Any]) -> set[str]:
        """Choose the origins that are this process's share."""
        # The number of lasting origins may change: see `jobs-lib topics repartition`.
        lasting = {*self._lasting(connection)}
        passing = {*self._passing(connection)} - lasting
        query = self._database.queries["live_processes"]
        live = dict(connection.execute(query, self._parameters).fetchall())
        takes_part = not (live.keys() - {self._process.id} and self._is_cut_off())
        self._process.take_part(self._role, takes_part)
        if not takes_part:
            return set()
        # After an outage this may run before the process's own heartbeat arrived.
        topics = self._process.topics if self._role == self._process.role else []
        live.setdefault(self._process.id, topics)
        followers: defaultdict[str, list[UUID]] = defaultdict(list)
        for process, followed in live.items():
            for topic in followed:
                followers[topic].append(process)
        groups: defaultdict[tuple[UUID, ...], list[str]] = defaultdict(list)
        for origin in sorted(lasting):
            groups[_candidates(origin, followers, live)].append(origin)
        owners: dict[str, UUID | None] = {
            origin: choose_owner(origin, _candidates(origin, followers, live))
            for origin in passing
        }
        for candidates, origins in groups.items():
            owners |= share_evenly(tuple(origins), candidates)
        return {o for o, owner in owners.items() if owner == self._process.id}


def _candidates(
    origin: str, followers: Mapping[str, Sequence[UUID]], live: Iterable[UUID]
) -> tuple[UUID, ...]:
    """The processes that may own ``origin``: followers of its topic, or else all."""
    return tuple(sorted(followers.get(origin.rpartition("/")[0], live)))
