"""Take and release origins in the database, with an epoch for each.

One thread for each role makes the owned origins equal to what the source wants. Its
changes need only row locks on ``origins``, and no other thread waits for them.
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
"""Seconds between two checks whether an owner has noticed a take-over."""
_BEATS = 3
"""After this many different heartbeats it has noticed."""


class Holder(Protocol):
    """Works on origins: an executor, a relay, or a consumer."""

    def take(self, origins: Mapping[str, int]) -> None:
        """Start to work on origins, with these epochs."""

    def release(self, origins: frozenset[str], timeout: float) -> None:
        """Stop working on origins; wait up to ``timeout`` seconds for running work.

        Work that still runs afterwards is fenced: it cannot commit for these origins.
        """


class JobHolder(Protocol):
    """A holder that has jobs in memory."""

    def lose(self, origins: Iterable[str]) -> None:
        """Begin no more jobs of these origins. Must not wait."""

    def hurry(self, jobs: Mapping[int, str]) -> None:
        """Run these jobs before all others of their origins: ids, with origins."""


@dataclass
class _Unnoticed:
    """An origin taken from a living process that may not have noticed it yet."""

    owner: UUID
    """The process that owned it before."""
    cut: dict[int, str]
    """The jobs that this process had in flight."""
    seen: datetime | None = None
    """Its last heartbeat."""
    beats: int = 0
    """How many different heartbeats were seen since the take-over."""


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
            role: the role in which it owns them.
            source: decides which origins it wants.
            holder: works on them.
            interval: seconds between two comparisons with the database.
            stale_after: seconds without a heartbeat until a process counts as dead.
            handover_timeout: seconds that running work has to finish.
            jobs: the holder, if it works on jobs.
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
        """Owned only in memory: a heartbeat found that other processes took them."""
        self._idle: frozenset[str] = frozenset()
        """Owned only in the database: the holder has released them, the row has not."""
        self._unnoticed: dict[str, _Unnoticed] = {}
        """Owned, but the holder must not work on them yet."""
        self._ousted: dict[str, _Unnoticed] = {}
        """Perhaps owned: it is not known whether the take-over was committed."""
        self._last_epoch = 0
        """The highest epoch that this process ever had in this role."""
        self._released = threading.Condition()
        self._changed = threading.Event()
        self._loop = Loop(
            f"own {role}",
            self._watch,
            # What a failed round has not done, the next one does at once.
            failed=lambda _: self._changed.set(),
            ended=self._release_all,
        )

    def start(self) -> None:
        """Start the source, and follow it; after an error neither runs any more."""
        self._process.add_watcher(self)
        try:
            self._loop.start()
            self._source.start(self._changed.set)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the source and release everything."""
        self._source.stop()
        self._loop.stopping.set()
        self._changed.set()
        self._loop.stop()

    @property
    def owned(self) -> dict[str, int]:
        """The origins and their epochs, as known here; callable from any thread."""
        with self._released:
            return dict(self._owned)

    def notice(self, believed: Mapping[str, int], found: Mapping[str, int]) -> None:
        """Begin no jobs of origins that others have taken; called by the heartbeat.

        This class's own thread may just wait for handlers of origins that it releases.
        """
        # Locked, so that no origin is taken anew between the check and the loss.
        with self._released:
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
        """Wait until none of ``origins`` is owned; returns False after ``timeout``."""
        leaving = set(origins)
        with self._released:
            return self._released.wait_for(
                lambda: not leaving & self._owned.keys(), timeout
            )

    def _watch(self) -> Iterator[None]:
        with self._database.connect(self._loop.name, impatient=True) as connection:
            while not self._loop.stopping.is_set():
                self._changed.wait(
                    min(self._interval, _SOON) if self._unnoticed else self._interval
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
        except BaseException as error:
            telemetry.emit("loop.failed", loop=self._loop.name, error=error)
            # Others take over once this process counts as stale.
            self._forget(owned)

    def _reconcile(self, connection: psycopg.Connection[Any]) -> None:
        if self._process.has_left:
            return
        self._source.look(connection)
        wanted = self._source.wanted
        if surplus := frozenset(self._owned) - wanted:
            self._release(connection, surplus)
        self._compare(connection, wanted)
        if self._unnoticed:
            self._begin_noticed(connection)
        if missing := wanted - (self._owned.keys() - self._idle):
            self._take(connection, missing)
        self._source.note_owned(frozenset(self._owned))

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
            living = others - dead
            parameters["origins"] = [
                origin
                for origin, owner in before.items()
                if origin in claims or owner not in living
            ]
            rows = connection.execute(queries["take_origins"], parameters).fetchall()
            # Jobs that this process itself had before an outage were cut by no crash.
            if others and self.role == self._process.role:
                cut = dict(
                    connection.execute(queries["strip_claims"], parameters).fetchall()
                )
            taken: dict[str, int] = dict(rows)
            # Before the commit: if its answer is lost, the row names this process, and
            # no longer the owner that may not have noticed.
            self._ousted |= {
                origin: _Unnoticed(owner, {i: o for i, o in cut.items() if o == origin})
                for origin, owner in before.items()
                if origin in taken and owner in living
            }
        if not taken:
            return
        self._last_epoch = max([self._last_epoch, *taken.values()])
        unnoticed = self._find_unnoticed(taken, before, living)
        # Before the origins count as owned: if the holder fails, they are taken again.
        self._hand_on({o: e for o, e in taken.items() if o not in unnoticed}, cut)
        self._unnoticed |= unnoticed
        for origin in taken:
            self._ousted.pop(origin, None)
        self._source.took(taken)
        with self._released:
            self._owned |= taken
        self._idle -= taken.keys()
        telemetry.emit("origins.taken", role=self.role, origins=sorted(taken))

    def _find_unnoticed(
        self, taken: Iterable[str], before: Mapping[str, UUID | None], living: set[UUID]
    ) -> dict[str, _Unnoticed]:
        """Find origins that were taken from living owners, now or just before.

        Args:
            taken: the origins that were taken now.
            before: their owners before that.
            living: those of these owners that live, without this process.
        """
        if self._jobs is None:
            return {}
        doubtful = living | {self._process.id}
        known = self._unnoticed | self._ousted
        return {o: known[o] for o in taken if o in known and before[o] in doubtful}

    def _hand_on(self, origins: Mapping[str, int], cut: Mapping[int, str]) -> None:
        if origins:
            self._holder.take(origins)
        hurried = {i: o for i, o in cut.items() if o in origins}
        if hurried and self._jobs is not None:
            # These jobs had begun already: they wait for one handler, not a backlog.
            self._jobs.hurry(hurried)

    def _begin_noticed(self, connection: psycopg.Connection[Any]) -> None:
        """Work on origins taken from living owners that begin none of their jobs now.

        The owner before notices the take-over by a heartbeat, and until then it may
        begin jobs that it has in memory. The first heartbeat seen here may have been
        answered before the take-over, and the answer to the second may be on its way.
        """
        owners = list({one.owner for one in self._unnoticed.values()})
        beats = dict(
            connection.execute(
                self._database.queries["heartbeats"],
                {"owners": owners, "stale_after": self._stale_after},
            ).fetchall()
        )
        for origin, one in list(self._unnoticed.items()):
            if origin in self._idle:
                # It is taken anew, or released, in a moment.
                continue
            beat = beats.get(one.owner)
            if beat != one.seen:
                one.seen, one.beats = beat, one.beats + 1
            if beat is None or one.beats >= _BEATS:
                self._hand_on({origin: self._owned[origin]}, one.cut)
                del self._unnoticed[origin]

    def _release_holder(self, origins: frozenset[str], timeout: float) -> None:
        """Make the holder release those of the origins that it works on."""
        if begun := origins - self._unnoticed.keys():
            self._holder.release(begun, timeout)

    def _compare(
        self, connection: psycopg.Connection[Any], wanted: frozenset[str]
    ) -> None:
        """Notice origins that another process took; until then the fence protects them.

        Also release again what the database lost: a server that lacks the last commits
        does not know the release, and nobody takes what a living process seems to own.
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
        # What this process has left meanwhile, it has not lost: it ends in a moment.
        if lost and not self._process.has_left:
            telemetry.emit("origins.lost", role=self.role, origins=sorted(lost))
            self._release_holder(lost, 0)
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
            self._release_holder(held, self._handover_timeout)
        # If the database does not answer now, the release is written later: nobody else
        # takes what a living process seems to own.
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
        with self._released:
            for origin in origins:
                self._owned.pop(origin, None)
                self._gone.pop(origin, None)
                self._unnoticed.pop(origin, None)
            self._released.notify_all()
        self._idle -= origins
