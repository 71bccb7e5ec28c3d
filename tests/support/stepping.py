"""An executor without threads, made of its own parts: a test makes every step."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID, uuid4

from jobs_lib.executor.claiming.claimer import Claimer
from jobs_lib.executor.claiming.pace import Pace
from jobs_lib.executor.dispatcher import Dispatcher
from jobs_lib.executor.lane import ClaimedJob, Item, Lane, Outcome
from jobs_lib.executor.round_trip import RoundTrip
from jobs_lib.executor.running.runner import Runner
from jobs_lib.executor.running.transaction import JobConnections, OwnTransaction
from jobs_lib.executor.settling.completer import Completer
from jobs_lib.ownership.lease import Lease
from jobs_lib.ownership.ownership import Ownership
from jobs_lib.ownership.role import EXECUTE

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import psycopg

    from jobs_lib.executor.round_trip import Answer, Statement
    from jobs_lib.executor.running.transaction import Borrow
    from jobs_lib.executor.section import Section
    from jobs_lib.jobs.type import JobType
    from jobs_lib.postgres.database import Database

INSTALLATION = UUID(int=1)


def nothing() -> None:
    """Do nothing between two steps, by default."""


class HeldRoundTrip(RoundTrip):
    """Lets the test do something before a round trip, and before its answer is read."""

    before: Callable[[], object] = staticmethod(nothing)
    after: Callable[[], object] = staticmethod(nothing)

    def exchange(
        self,
        *batches: Sequence[Statement],
        meanwhile: Callable[[], object] = nothing,
    ) -> tuple[list[Answer | None], psycopg.Error | None]:
        """Do the same, with something in between."""
        self.before()
        answer = super().exchange(*batches, meanwhile=meanwhile)
        self.after()
        return answer


class Hands:
    """Takes the place of workers: claimed jobs lie here until the test starts them."""

    size = 4
    idle = 0

    def __init__(self) -> None:
        self.ready: list[Item] = []

    @property
    def is_starving(self) -> bool:
        """Claim whenever there is room."""
        return True

    def put(self, items: Sequence[Item], *, first: bool = False) -> None:
        """Put these items here."""
        self.ready[:] = [*items, *self.ready] if first else [*self.ready, *items]

    def take_back(self, ended: object) -> list[Item]:
        """Take back the jobs that no worker has begun."""
        taken, self.ready = self.ready, []
        return taken

    def cancel(self, job: ClaimedJob) -> None:
        """Do nothing: a plain handler cannot be stopped."""


class Pod:
    """One executor: the test does the work of its threads, one step at a time."""

    def __init__(
        self,
        database: Database,
        connection: psycopg.Connection[Any],
        types: Mapping[str, JobType[Any]],
        *,
        limit: int = 8,
        lend: Borrow | None = None,
        section: Section | None = None,
    ) -> None:
        """Make a pod that owns nothing yet.

        Args:
            database: the database with the jobs.
            connection: the connection of the dispatcher.
            types: the handlers, which are never called.
            limit: how many jobs may be in flight.
            lend: lends connections for the jobs' own transactions; opens new ones by
                default.
            section: the types to claim; all by default.
        """
        self.id = uuid4()
        self.role = EXECUTE
        self.running: list[ClaimedJob] = []
        self.open: dict[int, OwnTransaction] = {}
        """The transactions of running jobs, by job."""
        self.open_late: dict[ClaimedJob, OwnTransaction] = {}
        """The transactions of attempts whose time is over."""
        self._begun: list[Lane] = []
        self._database = database
        self._connection = connection
        self.hands = Hands()
        self.lease = Lease()
        self.sees_others = True
        self.claimer = Claimer(
            self.id, INSTALLATION, types, lease=lambda: self.lease, section=section
        )
        self.round_trip = HeldRoundTrip(connection, database.queries, prepare=True)
        connections = JobConnections(
            types, database.queries, self.id, lend or self._lend
        )
        self.runner = Runner(types, connections)
        self._connections = connections
        self.dispatcher = Dispatcher(
            database,
            self.claimer,
            Completer(self.id, types),
            self.hands,  # type: ignore[arg-type]
            Pace(limit, limit),
            0.0,
            None,
            lambda: False,
        )
        # No time passes between two steps.
        self.dispatcher._aged_at = math.inf
        me: Any = self
        self._ownership = Ownership(
            database, me, "execute", me, me, interval=1, stale_after=1,
            handover_timeout=1,
        )  # fmt: skip
        connection.execute(
            database.queries["beat"],
            {
                "id": self.id, "pod": "pod", "roles": ["execute"], "host": "h",
                "pid": 1, "version": "0", "types": sorted(types), "topics": [],
                "busy": None,
            },
        )  # fmt: skip

    def close(self) -> None:
        """Release what it holds on the machine; the connection remains the caller's."""
        for job in list(self.running):
            self.abandon(job)
        for transaction in self.open_late.values():
            _break(transaction)
        self.dispatcher._wakeup.close()

    # What it owns

    def take_over(self, *origins: str) -> None:
        """Take over origins, also from living owners."""
        self._ownership._take(self._connection, frozenset(origins))
        self.round()

    def claims(self, missing: frozenset[str]) -> frozenset[str]:
        """As a source of origins: agree to all that is asked for."""
        return missing

    def took(self, origins: Iterable[str]) -> None:
        """As a source of origins: nothing to do."""

    def take(self, origins: Mapping[str, int]) -> None:
        """As the holder of origins: take them."""
        self.dispatcher.take(origins)

    def leave(self, *origins: str, hurried: bool = False) -> None:
        """Give origins back. Unless hurried, running jobs are waited for.

        They must have ended before, since nothing ends them meanwhile.
        """
        deadline = 0.0 if hurried else math.inf
        self.dispatcher.release(frozenset(origins), deadline)
        for _ in range(5):
            self.round()
            if not set(origins) & self.claimer.cursors.keys():
                break
        else:
            raise AssertionError(f"{origins} were not given back")
        self._connection.execute(
            self._database.queries["release_origins"],
            {"role": "execute", "owner": self.id, "origins": list(origins)},
        )

    # The dispatcher

    def round(
        self,
        before: Callable[[], object] = nothing,
        after: Callable[[], object] = nothing,
    ) -> None:
        """Make one round of the dispatcher, which looks at everything.

        Args:
            before: runs when the statements are made, and before they are sent.
            after: runs when they are answered, and before the answer is read.
        """
        poller = self.dispatcher._poller
        poller._next_at = poller._due_at = poller._late_commits._next_at = 0.0
        # The low marks rise as early as they may, so nothing is found by chance.
        marks = poller._late_commits._marks
        marks.extend([(at - 10, *rest) for at, *rest in _taken(marks)])
        self.round_trip.before, self.round_trip.after = before, after
        for position in self.claimer.cursors.values():
            position.all_plain = False  # send the whole claim, no short one first
        try:
            self.dispatcher._round(self.round_trip)
        finally:
            self.round_trip.before = self.round_trip.after = nothing

    def rounds(self, count: int = 3) -> None:
        """Make some rounds: the next round claims what the first one finds."""
        for _ in range(count):
            self.round()

    # A worker

    @property
    def startable(self) -> list[Item]:
        """The jobs and lanes from which something can be started."""
        return [*self._begun, *self.hands.ready]

    def start(self, at: int = 0) -> ClaimedJob | None:
        """Start a job; return None if it must not start any more."""
        item = self.startable[at]
        if at < len(self._begun):
            self._begun.pop(at)
        else:
            self.hands.ready.pop(at - len(self._begun))
        lane = item.lane if isinstance(item, ClaimedJob) else item
        if isinstance(item, ClaimedJob):
            job = item
        elif item.dropped or not item.jobs:
            item.finished.add_lane(item)
            return None
        else:
            job = item.jobs.popleft()
        if lane.dropped:
            return None
        job.started = True
        if lane.is_over():
            lane.finished.drop(job)
            if job.group is not None:
                lane.failed = True
                lane.finished.add_lane(lane)
            return None
        if job.cancel_requested:
            self._end(job, self.runner.cancelled(job))
            return None
        job.lend = self._connections.lend
        self.running.append(job)
        return job

    def start_all(self) -> list[ClaimedJob]:
        """Start every job that can start."""
        started = []
        while self.startable:
            if job := self.start():
                started.append(job)
        return started

    def finish(
        self, job: ClaimedJob, error: BaseException | None = None
    ) -> Outcome | None:
        """Let the job's handler return, or raise the error."""
        self.running.remove(job)
        outcome = None if error is None else self.runner._explain(job, error)
        outcome = self.runner._finish(job, outcome)
        self._end(job, outcome)
        return outcome

    def time_out(self, job: ClaimedJob) -> None:
        """End the job's time; its handler runs on."""
        job.timed_out = True
        self.running.remove(job)
        if transaction := self.open.pop(job.id, None):
            self.open_late[job] = transaction
        lane = job.lane
        lane.finished.add(job, self.runner.time_out(job))
        if job.group is not None:
            lane.failed = True
            lane.finished.add_lane(lane)

    def _end(self, job: ClaimedJob, outcome: Outcome | None) -> None:
        lane = job.lane
        going = lane.finished.add(job, outcome)
        if job.group is None:
            return
        if not going:
            lane.failed = True
        if lane.failed or lane.dropped or not lane.jobs:
            lane.finished.add_lane(lane)
        else:
            self._begun.append(lane)

    def begin(self, job: ClaimedJob) -> psycopg.Connection[Any]:
        """Let the handler open the job's own transaction."""
        self.open[job.id] = transaction = cast("OwnTransaction", job.transaction())
        return transaction.__enter__()

    def commit(self, job: ClaimedJob) -> Outcome | None:
        """Let the handler leave the transaction, and return."""
        try:
            self.open.pop(job.id).__exit__(None, None, None)
        except Exception as error:
            return self.finish(job, error)
        return self.finish(job)

    def abandon(self, job: ClaimedJob) -> None:
        """Let the job's process die: nothing more is heard of the job."""
        self.running.remove(job)
        if transaction := self.open.pop(job.id, None):
            _break(transaction)

    @contextmanager
    def _lend(self) -> Iterator[psycopg.Connection[Any]]:
        with self._database.connect("handler") as connection:
            yield connection


def _taken(marks: deque[Any]) -> Iterator[Any]:
    while marks:
        yield marks.popleft()


def _break(transaction: OwnTransaction) -> None:
    transaction.__exit__(RuntimeError, RuntimeError("the process is dead"), None)
