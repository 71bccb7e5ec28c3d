"""Live processes share the origins, over nothing but their heartbeats."""

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
    """The process that owns ``origin``: the same everywhere, with few moves.

    Rendezvous hashing (Thaler and Ravishankar, "A Name-Based Mapping Scheme for
    Rendezvous", 1996): the highest of the hashes of (process, origin).
    """
    return max(processes, key=lambda process: _weigh(process, origin), default=None)


@lru_cache(maxsize=64)
def share_evenly(
    origins: tuple[str, ...], processes: tuple[UUID, ...]
) -> dict[str, UUID]:
    """The owner of each of ``origins``: no process has two more than another.

    Rendezvous hashing with bounded loads: the pairs of (process, origin) are taken from
    the highest hash down, as long as the process has room. Few move when a process
    comes or goes: hardly more than must.
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

    Those that last are shared evenly. Those that come and go with their jobs are given
    one by one: none of them moves because another one came, and processes that do not
    see the same ones at the same time agree about those that both see.

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
        """The origins that are this process's share."""
        # Their number may change: see `jobs-lib topics repartition`.
        lasting = {*self._lasting(connection)}
        passing = {*self._passing(connection)} - lasting
        query = self._database.queries["live_processes"]
        live = dict(connection.execute(query, self._parameters).fetchall())
        takes_part = not (live.keys() - {self._process.id} and self._is_cut_off())
        self._process.take_part(self._role, takes_part)
        if not takes_part:
            return set()
        # After an outage it may look before its own heartbeat has come through.
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
    """Who may own ``origin``: the followers of its topic, or else all that live."""
    return tuple(sorted(followers.get(origin.rpartition("/")[0], live)))
