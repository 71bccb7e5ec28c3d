"""This process as other processes see it: an id, a pod's name, and a heartbeat."""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID, uuid4

from psycopg.types.json import Jsonb

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.loop import Loop
from jobs_lib.ownership.lease import Lease
from jobs_lib.ownership.role import EXECUTE
from jobs_lib.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import psycopg

    from jobs_lib.postgres.database import Database

_BURY_AFTER = 3_600.0
_LATE = 0.7
"""A heartbeat that is answered later than this share of ``stale_after`` leaves a gap.
An outage that has delayed it may have kept another process, whose last heartbeat was
older by an interval, from beating for all of ``stale_after``."""
_SILENT_SECONDS = 4.0
_MISSED = 4
"""Heartbeats without an answer after which the database counts as silent."""


class Watcher(Protocol):
    """Learns with each heartbeat what the process owns in a role."""

    role: str

    @property
    def owned(self) -> Mapping[str, int]:
        """The origins it believes to own, with epochs; read before a heartbeat."""

    def notice(self, believed: Mapping[str, int], found: Mapping[str, int]) -> None:
        """Compare these with what the heartbeat has found. Must not wait."""


class Process:
    """A row in ``processes``, kept fresh by a thread of its own.

    The id is new at every start: the origins of an earlier process of the same pod
    belong to another owner.
    """

    def __init__(
        self,
        database: Database,
        pod: str,
        roles: Iterable[str],
        interval: float,
        *,
        types: Iterable[str] = (),
        topics: Iterable[str] = (),
        give_up_after: float = math.inf,
        stale_after: float = 5.0,
    ) -> None:
        """Prepare.

        Args:
            database: where the row is kept.
            pod: the pod's name.
            roles: what the process does.
            interval: seconds between two heartbeats.
            types: the job types that it knows.
            topics: the topics whose partitions its executor follows.
            give_up_after: seconds without a heartbeat after which it is cut off.
            stale_after: seconds without a heartbeat after which another process counts
                as dead, and its transactions are ended. This process is no longer cut
                off after heartbeats without a failure for as long.
        """
        self.id: UUID = uuid4()
        database.sign(self.id)
        self.pod = pod
        self.roles = sorted(roles)
        self.types = sorted(types)
        self.topics = sorted(topics)
        self.role = EXECUTE
        """The role in which it owns the origins of jobs, if it runs any."""
        self.foreign: frozenset[str] = frozenset()
        """Types that executors of other apps knew at the last heartbeat."""
        self._database = database
        self._interval = interval
        self._give_up_after = give_up_after
        self._stale_after = stale_after
        # When the database is back, others count this process as dead after
        # `stale_after`: it must connect again before that.
        reconnect = replace(RECONNECT, cap=min(RECONNECT.cap, stale_after / 2))
        self._beaten_at = time.monotonic()
        self._sent_at = -math.inf
        """When the last heartbeat that was answered was sent."""
        self._well_since = -math.inf
        """The time since which no heartbeat is known to have failed or come late."""
        self.lease = Lease(-math.inf)
        """How long this process may begin jobs that it claims now."""
        self.report: Callable[[], list[dict[str, Any]]] = list
        """Returns, for each heartbeat, what jobs wait for: see ``Executor.report``."""
        self.has_left = False
        """Whether it has left everything to others: see :meth:`abandon`."""
        self._cut_off = False
        self._watchers: list[Watcher] = []
        self._failed = False
        """Whether the last attempt to beat failed."""
        self._loop = Loop(
            "heartbeat", self._beat, retry=reconnect, failed=self._note_failure
        )

    def start(self) -> None:
        """Beat once, so that every owner has a row; then start the thread."""
        with self._database.connect("heartbeat", impatient=True) as connection:
            self._beat_once(connection)
        telemetry.emit(
            "process.started", process=self.id, pod=self.pod, roles=self.roles
        )
        self._loop.start()

    def stop(self) -> None:
        """Stop beating and remove the row."""
        self._loop.stop()
        try:
            with self._database.connect("heartbeat", impatient=True) as connection:
                connection.execute(self._database.queries["leave"], {"id": self.id})
        except Exception as error:
            telemetry.emit("loop.failed", loop="heartbeat", error=error)

    def abandon(self, timeout: float) -> None:
        """Leave everything to other processes at once, even with jobs still running.

        Running jobs are fenced, and pay no attempt, because this end was ordered. Waits
        up to ``timeout`` seconds for the database. If it does not answer, the others
        treat this process as one that died.
        """

        def leave() -> None:
            # A heartbeat under way would bring the row back, and the others would leave
            # this process its share until it counts as dead.
            self._loop.stop(timeout / 2)
            try:
                with self._database.connect("heartbeat", impatient=True) as connection:
                    connection.execute(
                        self._database.queries["abandon"], {"id": self.id}
                    )
            except Exception as error:
                telemetry.emit("loop.failed", loop="heartbeat", error=error)

        self.has_left = True
        # In a thread: the caller has no time to wait for a server that is gone.
        leaving = threading.Thread(target=leave, daemon=True)
        leaving.start()
        leaving.join(timeout)

    def add_watcher(self, watcher: Watcher) -> None:
        """Call ``watcher`` with each heartbeat from now on."""
        self._watchers.append(watcher)

    def take_part(self, role: str, takes_part: bool) -> None:
        """Take or give up a role; the next heartbeat publishes it."""
        roles = {*self.roles} - {role} | ({role} if takes_part else set())
        if roles != {*self.roles}:
            event = "role.joined" if takes_part else "role.left"
            telemetry.emit(event, role=role, process=self.id)
            self.roles = sorted(roles)

    def doubt(self) -> None:
        """Note that the database was away, so others may not have reached it either."""
        self._well_since = time.monotonic()

    @property
    def sees_others(self) -> bool:
        """Whether every living process has had time to beat.

        False in an outage, and for ``stale_after`` seconds after it: the others could
        not beat either, and may come back later than this process. True from the start
        for a process that reached the database at once.
        """
        long_enough = time.monotonic() - self._well_since >= self._stale_after
        return long_enough and not self._is_late()

    def is_unanswered(self) -> bool:
        """Whether the database has left the last heartbeats without an answer."""
        patience = max(_SILENT_SECONDS, _MISSED * self._interval)
        return time.monotonic() - self._beaten_at > patience

    def is_cut_off(self) -> bool:
        """Whether the database has been away so long that others should take over.

        It stays true until the database has been back for a while, so that the pod does
        not come and go with each outage.
        """
        now = time.monotonic()
        if now - self._beaten_at > self._give_up_after:
            self._cut_off = True
        elif self._cut_off and now - self._well_since >= self._stale_after:
            self._cut_off = False
        return self._cut_off

    def _is_late(self) -> bool:
        return time.monotonic() - self._sent_at > _LATE * self._stale_after

    def _beat(self) -> Iterator[None]:
        if self._failed:
            # The database was away until now, as far as this process knows.
            self._failed = False
            self.doubt()
        with self._database.connect(self._loop.name, impatient=True) as connection:
            while not self._loop.stopping.wait(self._interval):
                self._beat_once(connection)
                yield

    def _note_failure(self, _: BaseException) -> None:
        self._failed = True

    def _beat_once(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        queries = self._database.queries
        believed = [(watcher, watcher.owned) for watcher in self._watchers]
        sent_at = time.monotonic()
        connection.execute(
            queries["beat"],
            {
                "id": self.id,
                "pod": self.pod,
                "roles": self.roles,
                "host": platform.node(),
                "pid": os.getpid(),
                "version": __version__,
                "types": self.types,
                "topics": self.topics,
                "busy": Jsonb(busy) if (busy := self.report()) else None,
            },
        )
        owned = connection.execute(queries["owned"], {"id": self.id}).fetchall()
        # Before the lease is renewed: a job of an origin that others have taken must
        # not begin under the longer lease.
        for watcher, before in believed:
            watcher.notice(before, {o: e for r, o, e in owned if r == watcher.role})
        # The first heartbeat cannot be late.
        if self._is_late() and self._sent_at > -math.inf:
            self.doubt()
        self._sent_at = sent_at
        self.lease = self.lease.renew(sent_at, self._stale_after)
        if self.role in self.roles:
            self._read_foreign_types(connection)
        if self.sees_others:
            self._bury_the_dead(connection)
        self._beaten_at = time.monotonic()

    def _read_foreign_types(self, connection: psycopg.Connection[Any]) -> None:
        query = self._database.queries["foreign_types"]
        ((types,),) = connection.execute(query, {"role": self.role}).fetchall()
        # Keep the same object while nothing changes: claims compare it each round.
        if (foreign := frozenset(types)) != self.foreign:
            self.foreign = foreign

    def _bury_the_dead(self, connection: psycopg.Connection[Any]) -> None:
        queries = self._database.queries
        ended = connection.execute(
            queries["end_silent_sessions"], {"stale_after": self._stale_after}
        ).fetchall()
        for process, sessions in ended:
            telemetry.emit("sessions.ended", process=process, sessions=sessions)
        connection.execute(queries["bury"], {"after": _BURY_AFTER})
