"""Take and give origins: the database's side of ownership, with an epoch for each.

One thread per role makes what is owned equal to what the source wants. All its changes
are row locks on ``origins``; nobody else in the process waits for the database here.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from jobs_lib import telemetry
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime
    from uuid import UUID

    import psycopg

    from jobs_lib.ownership.process import Process
    from jobs_lib.ownership.source import Source
    from jobs_lib.postgres.database import Database

_SOON = 0.1
"""Seconds between two looks whether an owner has heard of a take-over."""
_BEATS = 3
"""So many of its heartbeats, and it has."""


class Holder(Protocol):
    """What works on the origins: an executor, a relay, a consumer."""

    def take(self, origins: Mapping[str, int]) -> None:
        """Start to work on origins at these epochs."""

    def release(self, origins: frozenset[str], timeout: float) -> None:
        """Stop working on origins; wait up to ``timeout`` seconds for what is running.

        What still runs afterwards is fenced: it can commit nothing of these origins.
        """


class JobHolder(Protocol):
    """A holder that has jobs in memory."""

    def lose(self, origins: Iterable[str]) -> None:
        """Begin nothing more of these origins, and wait for nothing."""

    def hurry(self, jobs: Mapping[int, str]) -> None:
        """Run these before all others of their origins: ids, with their origins."""


@dataclass
class _Unheard:
    """An origin that was taken from a living process, which may not know it yet."""

    owner: UUID
    """From whom."""
    cut: dict[int, str]
    """What it had in flight."""
    seen: datetime | None = None
    """Its last heartbeat."""
    beats: int = 0
    """How many different ones were seen since the take-over."""


class Ownership:
    """The origins that this process owns in one role."""

    def __init__(
        self,
        database: Database,
        process: Process,
        role: str,
        source: Source,
        holder: Holder,
        *,
        interval: float,
        stale_after: float,
        handover_timeout: float,
        jobs: JobHolder | None = None,
    ) -> None:
        """Prepare.

        Args:
            database: where the origins are.
            process: the owner.
            role: in which it owns them.
            source: says which.
            holder: works on them.
            interval: seconds between two looks at what is owned.
            stale_after: seconds without a heartbeat until a process counts as dead.
            handover_timeout: seconds that running work has to finish.
            jobs: the holder, if what it works on are jobs.
        """
        self.role = role
        self._database = database
        self._process = process
        self._source = source
        self._holder = holder
        self._interval = interval
        self._stale_after = stale_after
        self._handover_timeout = handover_timeout
        self._owned: dict[str, int] = {}
        self._jobs = jobs
        self._gone: dict[str, int] = {}
        """Owned here alone: a heartbeat has found that others have taken them."""
        self._idle: frozenset[str] = frozenset()
        """Owned in the database alone: the holder has let go, the row not yet."""
        self._unheard: dict[str, _Unheard] = {}
        """Owned, but not to be worked on yet."""
        self._last_epoch = 0
        """The highest that this process ever had here."""
        self._given_back = threading.Condition()
        self._changed = threading.Event()
        self._loop = Loop(f"own {role}", self._watch, ended=self._release_all)

    def start(self) -> None:
        """Start the source, and follow it."""
        self._process.tell(self)
        self._loop.start()
        self._source.start(self._changed.set)

    def stop(self) -> None:
        """Stop the source and give everything back."""
        self._source.stop()
        self._loop.stopping.set()
        self._changed.set()
        self._loop.stop()

    @property
    def owned(self) -> dict[str, int]:
        """The origins and their epochs, as far as is known here; for any thread."""
        with self._given_back:
            return dict(self._owned)

    def notice(self, believed: Mapping[str, int], found: Mapping[str, int]) -> None:
        """Begin nothing more of what others have taken; called by the heartbeat.

        The own thread may be waiting for handlers that hand other origins over.
        """
        # Locked: what is dropped must not have been taken anew meanwhile.
        with self._given_back:
            gone = {
                origin: epoch
                for origin, epoch in believed.items()
                if found.get(origin) != epoch == self._owned.get(origin)
                and origin not in self._idle
            }
            if gone:
                self._gone |= gone
                if self._jobs is not None:
                    self._jobs.lose(gone)
        if gone:
            self._changed.set()

    def wait_released(self, origins: Iterable[str], timeout: float) -> bool:
        """Wait until none of ``origins`` is owned any more; False after ``timeout``."""
        leaving = set(origins)
        with self._given_back:
            return self._given_back.wait_for(
                lambda: not leaving & self._owned.keys(), timeout
            )

    def _watch(self) -> Iterator[None]:
        with self._database.connect(self._loop.name, impatient=True) as connection:
            while not self._loop.stopping.is_set():
                self._changed.wait(
                    min(self._interval, _SOON) if self._unheard else self._interval
                )
                self._changed.clear()
                if not self._loop.stopping.is_set():
                    self._reconcile(connection)
                yield

    def _release_all(self) -> None:
        owned = frozenset(self._owned)
        if not owned:
            return
        try:
            with self._database.connect(self._loop.name, impatient=True) as connection:
                self._release(connection, owned)
        except BaseException:
            # Others take over once this process counts as stale.
            self._forget(owned)

    def _reconcile(self, connection: psycopg.Connection[Any]) -> None:
        wanted = self._source.wanted
        if surplus := frozenset(self._owned) - wanted:
            self._release(connection, surplus)
        self._compare(connection, wanted)
        if self._unheard:
            self._begin_heard(connection)
        if missing := wanted - (self._owned.keys() - self._idle):
            self._take(connection, missing)

    def _take(
        self, connection: psycopg.Connection[Any], missing: frozenset[str]
    ) -> None:
        queries = self._database.queries
        parameters = {
            "role": self.role,
            "owner": self._process.id,
            "origins": sorted(missing),
            "stale_after": self._stale_after,
            "sees_others": self._process.sees_others,
            "last_epoch": self._last_epoch,
        }
        connection.execute(queries["make_origins"], parameters)
        free = connection.execute(queries["free_origins"], parameters).fetchall()
        claims = self._source.claims(missing)
        taking = {row[0] for row in free} | claims
        if not taking:
            return
        parameters["origins"] = sorted(taking)
        cut: dict[int, str] = {}
        with connection.transaction():
            before = dict(connection.execute(queries["lock_origins"], parameters))
            others = {o for o in before.values() if o not in (None, self._process.id)}
            parameters["owners"] = list(others)
            dead = {
                row[0] for row in connection.execute(queries["lock_dead"], parameters)
            }
            parameters["origins"] = [
                origin
                for origin, owner in before.items()
                if origin in claims or owner not in others - dead
            ]
            rows = connection.execute(queries["take_origins"], parameters).fetchall()
            # What this process had itself, before an outage, was cut off by no crash.
            if others and self.role == self._process.role:
                cut = dict(
                    connection.execute(queries["strip_claims"], parameters).fetchall()
                )
        if not rows:
            return
        taken: dict[str, int] = dict(rows)
        self._last_epoch = max([self._last_epoch, *taken.values()])
        unheard = {
            origin: _Unheard(owner, {i: o for i, o in cut.items() if o == origin})
            for origin, owner in before.items()
            if origin in taken and owner in others - dead and self._jobs is not None
        }
        # Before they count as owned: if the holder fails, they are taken again.
        self._hand_on({o: e for o, e in taken.items() if o not in unheard}, cut)
        self._unheard |= unheard
        self._source.took(taken)
        with self._given_back:
            self._owned |= taken
        self._idle -= taken.keys()
        telemetry.emit("origins.taken", role=self.role, origins=sorted(taken))

    def _hand_on(self, origins: Mapping[str, int], cut: Mapping[int, str]) -> None:
        if origins:
            self._holder.take(origins)
        hurried = {i: o for i, o in cut.items() if o in origins}
        if hurried and self._jobs is not None:
            # They had begun already: one more handler's time, and not a backlog's.
            self._jobs.hurry(hurried)

    def _begin_heard(self, connection: psycopg.Connection[Any]) -> None:
        """Work on what was taken from the living, once they begin nothing of it more.

        The owner before hears of the take-over by a heartbeat, and what it has in
        memory may begin until then. The heartbeat that is seen first may have been
        answered before the take-over, and the answer to the second may be on its way.
        """
        owners = list({one.owner for one in self._unheard.values()})
        beats = dict(
            connection.execute(
                self._database.queries["heartbeats"],
                {"owners": owners, "stale_after": self._stale_after},
            ).fetchall()
        )
        for origin, one in list(self._unheard.items()):
            beat = beats.get(one.owner)
            if beat != one.seen:
                one.seen, one.beats = beat, one.beats + 1
            if beat is None or one.beats >= _BEATS:
                self._hand_on({origin: self._owned[origin]}, one.cut)
                del self._unheard[origin]

    def _let_go(self, origins: frozenset[str], timeout: float) -> None:
        """The holder stops working on what it works on of these."""
        if begun := origins - self._unheard.keys():
            self._holder.release(begun, timeout)

    def _compare(
        self, connection: psycopg.Connection[Any], wanted: frozenset[str]
    ) -> None:
        """Notice what another process has taken; the fence holds meanwhile.

        And what was given back in vain: a server that lacks the last commits knows
        nothing of it, and nobody takes what a living process seems to own.
        """
        rows = connection.execute(
            self._database.queries["owned_origins"],
            {"role": self.role, "owner": self._process.id},
        ).fetchall()
        still = dict(rows)
        gone = self._gone
        lost = frozenset(
            o for o, e in self._owned.items() if still.get(o) != e or gone.get(o) == e
        )
        if lost:
            telemetry.emit("origins.lost", role=self.role, origins=sorted(lost))
            self._let_go(lost, 0)
            self._forget(lost)
        if stray := still.keys() - self._owned.keys() - wanted:
            self._write_released(connection, stray)

    def _release(
        self, connection: psycopg.Connection[Any], origins: frozenset[str]
    ) -> None:
        if not origins:
            return
        deadline = time.monotonic() + self._handover_timeout
        if held := origins - self._idle:
            self._let_go(held, self._handover_timeout)
        # If the database does not answer now, it is told again: nobody else takes what
        # a living process seems to own.
        self._idle |= held
        self._write_released(connection, origins)
        telemetry.emit(
            "origins.released",
            role=self.role,
            origins=sorted(origins),
            late=time.monotonic() > deadline,
        )
        self._forget(origins)

    def _write_released(
        self, connection: psycopg.Connection[Any], origins: Iterable[str]
    ) -> None:
        connection.execute(
            self._database.queries["release_origins"],
            {
                "role": self.role,
                "owner": self._process.id,
                "origins": sorted(origins),
            },
        )

    def _forget(self, origins: frozenset[str]) -> None:
        with self._given_back:
            for origin in origins:
                self._owned.pop(origin, None)
                self._gone.pop(origin, None)
                self._unheard.pop(origin, None)
            self._given_back.notify_all()
        self._idle -= origins
