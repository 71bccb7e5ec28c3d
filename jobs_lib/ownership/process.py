"""This process, as others see it: an id, a pod's name, and a heartbeat."""

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


class Watcher(Protocol):
    """Is told with each heartbeat what the process owns in a role."""

    role: str

    @property
    def owned(self) -> Mapping[str, int]:
        """What it believes to own, and under which epochs; asked before a heartbeat."""

    def notice(self, believed: Mapping[str, int], found: Mapping[str, int]) -> None:
        """Compare that with what the heartbeat has found, and wait for nothing."""


class Process:
    """A row in ``processes``, kept fresh by a thread of its own.

    The id is new at every start: what an earlier life of the same pod owned is foreign.
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
        role: str = EXECUTE,
        give_up_after: float = math.inf,
        stale_after: float = 5.0,
    ) -> None:
        """Prepare.

        Args:
            database: where the row is kept.
            pod: the pod's name.
            roles: what the process does.
            interval: seconds between two heartbeats.
            types: of the jobs that it knows.
            topics: whose partitions its executor follows.
            role: in which its executor owns origins.
            give_up_after: seconds without a heartbeat from which on it is cut off.
            stale_after: seconds without a heartbeat from which on another process is
                dead, and its transactions are ended; and of heartbeats without a
                failure until this one is no longer cut off.
        """
        self.id: UUID = uuid4()
        database.sign(self.id)
        self.pod = pod
        self.roles = sorted(roles)
        self.types = sorted(types)
        self.topics = sorted(topics)
        self.role = role
        """In which it owns the origins of jobs, if it runs any."""
        self.foreign: frozenset[str] = frozenset()
        """Types that the executors of other apps know, as of the last heartbeat."""
        self._database = database
        self._interval = interval
        self._give_up_after = give_up_after
        self._stale_after = stale_after
        # Once the database is back, others take it for dead after `stale_after`.
        reconnect = replace(RECONNECT, cap=min(RECONNECT.cap, stale_after / 2))
        self._beaten_at = time.monotonic()
        self._well_since = -math.inf
        """Since when no heartbeat has failed or come late, as far as is known."""
        self.lease = Lease(-math.inf)
        """How long this process may begin jobs that it claims now."""
        self.report: Callable[[], list[dict[str, Any]]] = list
        """Says with each heartbeat what jobs wait for: see ``Executor.report``."""
        self._cut_off = False
        self._watchers: list[Watcher] = []
        self._failed = False
        """Whether the last attempt to beat failed."""
        self._loop = Loop(
            "heartbeat", self._beat, retry=reconnect, failed=self._note_failure
        )

    def start(self) -> None:
        """Beat once, so that nothing is owned by a stranger; then go on."""
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
        """Leave everything to others at once, whatever is still running.

        What runs is fenced, and pays no attempt: this end was ordered. Waits up to
        ``timeout`` seconds for the database; if it does not answer, others find a
        process that died.
        """

        def leave() -> None:
            try:
                with self._database.connect("heartbeat", impatient=True) as connection:
                    connection.execute(
                        self._database.queries["abandon"], {"id": self.id}
                    )
            except Exception as error:
                telemetry.emit("loop.failed", loop="heartbeat", error=error)

        self._loop.stopping.set()
        # Whoever asks has no time to wait for a server that is gone.
        leaving = threading.Thread(target=leave, daemon=True)
        leaving.start()
        leaving.join(timeout)

    def tell(self, watcher: Watcher) -> None:
        """Tell it with each heartbeat from now on what this process owns."""
        self._watchers.append(watcher)

    def take_part(self, role: str, takes_part: bool) -> None:
        """Have a role, or leave it to others; told by the next heartbeat."""
        roles = {*self.roles} - {role} | ({role} if takes_part else set())
        if roles != {*self.roles}:
            event = "role.joined" if takes_part else "role.left"
            telemetry.emit(event, role=role, process=self.id)
            self.roles = sorted(roles)

    def doubt(self) -> None:
        """Note that the database was away: others may not have reached it either."""
        self._well_since = time.monotonic()

    @property
    def sees_others(self) -> bool:
        """Whether a process that lives would have been seen to beat by now.

        Not in an outage, nor for ``stale_after`` seconds after one: it has kept the
        others from beating, too, and they may come back later than this one. True from
        its start for a process that has found the database at once.
        """
        long_enough = time.monotonic() - self._well_since >= self._stale_after
        return long_enough and not self.lease.is_over()

    def is_cut_off(self) -> bool:
        """Whether the database has been away for so long that others should take over.

        It must have been back for a while, too: a pod must not come and go with it.
        """
        now = time.monotonic()
        if now - self._beaten_at > self._give_up_after:
            self._cut_off = True
        elif self._cut_off and now - self._well_since >= self._stale_after:
            self._cut_off = False
        return self._cut_off

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
        # First: nothing begins under the longer lease that others have taken.
        for watcher, before in believed:
            watcher.notice(before, {o: e for r, o, e in owned if r == watcher.role})
        # The first one is not late.
        if self.lease.is_over() and self.lease.until > -math.inf:
            self.doubt()
        self.lease = self.lease.renew(sent_at, self._stale_after)
        if self.role in self.roles:
            self._look_at_apps(connection)
        if self.sees_others:
            self._see_to_the_dead(connection)
        self._beaten_at = time.monotonic()

    def _look_at_apps(self, connection: psycopg.Connection[Any]) -> None:
        query = self._database.queries["foreign_types"]
        ((types,),) = connection.execute(query, {"role": self.role}).fetchall()
        # The same object as long as nothing changes: claims ask in every round.
        if (foreign := frozenset(types)) != self.foreign:
            self.foreign = foreign

    def _see_to_the_dead(self, connection: psycopg.Connection[Any]) -> None:
        queries = self._database.queries
        ended = connection.execute(
            queries["end_silent_sessions"], {"stale_after": self._stale_after}
        ).fetchall()
        for process, sessions in ended:
            telemetry.emit("sessions.ended", process=process, sessions=sessions)
        connection.execute(queries["bury"], {"after": _BURY_AFTER})
