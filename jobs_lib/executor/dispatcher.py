"""A dispatcher: one thread that talks to the database.

It settles the jobs that have ended and claims more, in one round trip, while the
workers run jobs claimed before. Between two rounds it sleeps until a job ends, until a
hint of new work comes, or until it is time to poll.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import UnavailableError
from jobs_lib.executor.batch import Batch
from jobs_lib.executor.claiming.in_flight import name_rows
from jobs_lib.executor.claiming.polling import Poller
from jobs_lib.executor.claiming.rows import JumpRow
from jobs_lib.executor.claiming.scope import SKIP_PAUSE
from jobs_lib.executor.hand_over import Commands, HandOver
from jobs_lib.executor.limiting.gate import LOOK_SECONDS
from jobs_lib.executor.round_trip import RoundTrip
from jobs_lib.executor.settling.settler import SETTLE_WITHIN, Settler
from jobs_lib.loop import Loop
from jobs_lib.postgres.values import int_array
from jobs_lib.postgres.wakeup import Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from jobs_lib.executor.claiming.claimer import Claimer
    from jobs_lib.executor.claiming.next_groups import Shared
    from jobs_lib.executor.claiming.pace import Pace
    from jobs_lib.executor.claiming.rows import Due
    from jobs_lib.executor.lane import ClaimedJob, Item
    from jobs_lib.executor.limiting.limiter import Limiter
    from jobs_lib.executor.meter import Meter
    from jobs_lib.executor.round_trip import Statement
    from jobs_lib.executor.running.workers import WorkerPool
    from jobs_lib.executor.section import Section
    from jobs_lib.executor.settling.completer import Completer
    from jobs_lib.postgres.database import Database

    Heard = Callable[[], None] | None
    Share = Callable[
        ["Dispatcher", Sequence[Shared], Sequence[Due] | None, Heard], None
    ]

_BARRED = 0.05
"""Seconds between checks whether the process has its lease back."""
_HOARDED = 1.0
"""Seconds that a claimed job may wait for a worker before it is released. Meanwhile it
may be paused, and a crash counts for it."""


class Dispatcher:
    """Claims and settles the jobs of some origins.

    In each round the settler, the limiter, the poller and the claimer make batches. The
    dispatcher sends them together, and each part reads the answers to its own.
    """

    def __init__(
        self,
        database: Database,
        claimer: Claimer,
        completer: Completer,
        workers: WorkerPool,
        pace: Pace,
        poll_interval: float,
        hinted: Callable[[str], bool] | None,
        receives_hints: Callable[[], bool],
        meter: Meter | None = None,
        limiter: Limiter | None = None,
        share: Share | None = None,
        *,
        takes_slots: bool = True,
    ) -> None:
        """Prepare to dispatch.

        Args:
            database: holds the jobs.
            claimer: claims some of them.
            completer: settles them.
            workers: runs them.
            pace: says how many may be in flight.
            poll_interval: seconds between two polls, when idle.
            hinted: called with hints, for others that they concern; returns whether
                there are any. None to listen to no hints.
            receives_hints: says whether hints can come now, to any dispatcher.
            meter: counts the jobs' outcomes; None not to count.
            limiter: passes jobs on to the workers if their type has a limit.
            share: informs the executor's other sections of groups and due jobs.
            takes_slots: whether it asks for the limiter's slots; one of the dispatchers
                that share the limiter does.
        """
        self._database = database
        self._claimer = claimer
        self._workers: WorkerPool | Limiter = limiter or workers
        self._limiter = limiter
        self._takes_slots = limiter is not None and takes_slots
        self._share = share
        self._pace = pace
        self._poller = Poller(claimer, poll_interval)
        listens = database.listens and hinted is not None
        self._wakeup = Wakeup(database, database.channel if listens else None)
        self._turns = 0
        """How often the connection for hints had come up or broken off."""
        self._hinted = hinted
        self._receives_hints = receives_hints
        self._meter = meter
        self._finished = claimer.finished
        self._finished.wake = self._wakeup.set
        self._settler = Settler(claimer, completer, pace, meter)
        self._put_at = 0.0
        self._aged_at, self._aged = 0.0, 0
        """When to look next for claims that have become old, and up to which number
        claims are old then."""
        self._stopping = threading.Event()
        self._commands = Commands(self._wakeup.set)
        self._hand_over = HandOver(
            self._commands, claimer, self._settler, self._poller, self._stopping
        )
        self._loop = Loop(
            "executor",
            self._dispatch,
            stopping=self._stopping,
            failed=self._doubt,
            ended=self._wakeup.close,
        )
        self.pulse = self._loop.pulse

    def start(self) -> None:
        """Start the thread; nothing is claimed until origins are taken."""
        self._loop.start()

    def stop(self) -> None:
        """Stop the thread. Call after the origins have been released."""
        self._stopping.set()
        self._wakeup.set()
        self._loop.stop()

    def wake(self) -> None:
        """Make the dispatcher look for work; any thread may call this."""
        self._wakeup.set()

    @property
    def running(self) -> list[ClaimedJob]:
        """The jobs that were begun and are not settled; any thread may ask."""
        # Copied in one step: its own thread may change it meanwhile.
        return [job for job in [*self._claimer.in_flight.jobs.values()] if job.started]

    # Called by any thread

    def take(self, origins: Mapping[str, int]) -> None:
        """Start to claim from origins at these epochs."""
        self._hand_over.take(origins)

    def quiesce(self, deadline: float) -> Callable[[], list[int]]:
        """Claim nothing more; the returned function waits for running jobs."""
        return self._hand_over.quiesce(deadline)

    def release(self, origins: frozenset[str], deadline: float) -> Callable[[], None]:
        """Stop claiming from origins; the returned function waits for running jobs.

        It settles those that have ended by then.
        """
        return self._hand_over.release(origins, deadline)

    def lose(self, origins: frozenset[str]) -> None:
        """Begin no more jobs of origins that others have taken: a release follows."""
        self._hand_over.lose(origins)

    def hurry(self, jobs: Mapping[int, str]) -> None:
        """Claim these first: ids, with their origins."""
        self._commands.add(lambda: self._claimer.wanted.hurry(jobs))

    def owns(self, origin: str) -> bool:
        """Whether it claims from an origin of this name."""
        return origin in self._claimer.cursors

    def hint(self, origin: str) -> None:
        """Note a hint of something new in an origin."""
        self._commands.add(lambda: self._claimer.windows.hint(origin))

    def follow(self, groups: Sequence[tuple[str, str]], heard: Heard = None) -> None:
        """Go on with groups that another section has passed on.

        Args:
            groups: origins and groups.
            heard: called as soon as groups that go on here will be passed back.
        """

        def follow() -> None:
            for origin, group in groups:
                self._claimer.follow(origin, group)
            if heard is not None:
                heard()

        self._commands.add(follow)

    def take_due(self, rows: Sequence[Due]) -> None:
        """Claim due jobs that another section has found."""
        self._commands.add(lambda: self._claimer.take_due(rows))

    def look_back(self, lows: Mapping[str, int] | None = None) -> None:
        """Look for jobs behind the cursors of which no section can tell.

        Args:
            lows: the ids behind which they lie, by origin; None for all.
        """
        self._commands.add(partial(self._claimer.look_back, lows))

    @property
    def receives_hints(self) -> bool:
        """Whether hints can reach it now."""
        return self._wakeup.receives_hints

    @property
    def section(self) -> Section:
        """The types that it claims."""
        return self._claimer.section

    @property
    def lacks_slots(self) -> bool:
        """Whether jobs that it has claimed wait for a limit."""
        return self._limiter is not None and self._limiter.lacks_slots

    # The dispatcher's thread

    def _dispatch(self) -> Iterator[None]:
        with self._database.connect(self._loop.name, impatient=True) as connection:
            self._settler.note_connected()
            round_trip = RoundTrip(
                connection, self._database.queries, prepare=self._database.prepares
            )
            self._recover(round_trip)
            while not self._stopping.is_set():
                self._round(round_trip)
                yield
            # One last round settles and releases the jobs that have ended until now.
            self._round(round_trip)

    def _doubt(self, _: BaseException) -> None:
        """The last round may or may not have been written."""
        self._settler.doubt()
        self._collect()

    def _recover(self, round_trip: RoundTrip) -> None:
        """Forget what is known of rows: a new server answers that may lack commits."""
        self._take_back()
        self._claimer.doubt()
        self._poller.doubt()
        claimer, flying = self._claimer, [*self._claimer.in_flight.jobs.values()]
        owner = {"owner": claimer.owner}
        ids = int_array(job.id for job in flying)
        # A claim whose answer was lost took nothing; its row must not say otherwise.
        claims: list[Statement] = [
            (
                "forget_claims",
                {
                    **owner,
                    "seqs": int_array(claimer.in_flight.claims),
                    "first": claimer.first,
                    "step": claimer.step,
                },
            ),
            (
                "keep_claims",
                {**owner, "seqs": int_array(j.lane.seq for j in flying), "ids": ids},
            ),
        ]
        answers, failure = round_trip.exchange(
            [*claims, ("find_overtaken", name_rows(flying)), ("read_server", {})]
        )
        if failure or not answers[0]:
            raise failure or UnavailableError("the database did not answer")
        (*_, lost, ((server,),)) = answers[0]
        if self._limiter:
            self._limiter.doubt()
        claimer.in_flight.fence(job_id for job_id, _ in lost)
        claimer.server = round_trip.server = server
        self._tell_of_lost()

    def _round(self, round_trip: RoundTrip) -> None:
        self._commands.run()
        self._release_old()
        # Only now: the claim asks by id for the head of a lane that was taken back, and
        # finds it once what has run of that lane is settled.
        self._collect()
        gated = self._claimer.gated
        gated.look()
        opened = Batch()
        if gated.gate is not None:
            opened = gated.prepare(self._claimer.active(), self._claimer.wanted)
        polls = self._poller.prepare(
            busy=len(self._claimer.in_flight) > 0, hinted=self._receives_hints()
        )
        claim, jump = self._prepare_claim()
        slots = Batch()
        if self._limiter and self._takes_slots:
            slots = self._limiter.prepare()
        hurried = self._hand_over.is_awaited or self._stopping.is_set()
        idle = not (polls or claim or jump or slots or opened or hurried)
        if idle and self._settler.is_too_little(starving=self._workers.is_starving):
            self._sleep()
            return
        settle = self._prepare_settle(also_claims=bool(polls or claim or hurried))
        # The claim sees all rows that the jump has seen.
        batches = [b for b in (settle, slots, *polls, opened, jump, claim) if b]
        if not batches:
            settle.read()
            # In the last round it has been woken already, and nobody wakes it again.
            if not self._stopping.is_set():
                self._sleep()
            return
        answers, failure = round_trip.exchange(
            *[batch.statements for batch in batches], meanwhile=self._measure
        )
        # Batches after a failed one are not sent, and have no answer.
        for batch, answer in zip(batches, answers, strict=False):
            batch.answer = answer
        # The claim first: it may have passed over jobs of lanes that ended since. No
        # lane ends before, or nothing would lead to these jobs.
        for batch in (claim, jump, settle, slots, *polls, opened):
            batch.read()
        self._tell_others()
        if self._poller.cancelled:
            self._cancel()
        if failure:
            raise failure

    def _collect(self) -> None:
        self._settler.collect()

    def _prepare_settle(self, *, also_claims: bool) -> Batch:
        """Statements that write outcomes, and others not worth their own round trip.

        Args:
            also_claims: whether there is a round trip anyway.
        """
        settle = self._settler.prepare()
        settle.then = self._settled
        if settle or also_claims:
            settle.questions += self._settler.end_claims()
        if not settle:
            # Committed in a job's own transaction, or dropped: nothing to write.
            settle.answer = []
        return settle

    def _tell_others(self) -> None:
        """Pass on to other sections the groups and due jobs that are theirs."""
        groups = self._claimer.next_groups
        if self._share and (groups.shared or self._poller.due):
            due, self._poller.due = self._poller.due, []
            # Their lanes may end before they hear of the jobs that a jump has passed.
            jumped = groups.take_jumped()
            heard = partial(self.look_back, jumped) if jumped else None
            self._share(self, groups.take_shared(), due, heard)

    def _tell_of_lost(self) -> None:
        """Let other sections look for jobs that were made available unheard."""
        # Its own are found from the start on.
        if self._share and self._poller.is_promoting:
            self._share(self, (), None, None)
        self._poller.is_promoting = False

    def _prepare_claim(self) -> tuple[Batch, Batch]:
        """A claim, and a jump past jobs that cannot run; either may be empty."""
        if self._claimer.is_barred:
            return Batch(), Batch()
        # Jobs that have ended are settled in this same round trip.
        flying = len(self._claimer.in_flight) - len(self._settler)
        limit = self._pace.limit
        if self._limiter and (stuck := self._limiter.count_stuck(self._finished)):
            if stuck >= self._pace.most:
                return Batch(), Batch()
            # They wait for their own values, and do not delay others.
            flying -= stuck
        # Slow jobs: workers that the other dispatcher leaves idle serve this one.
        room = max(limit - flying, min(self._workers.idle, self._pace.most - flying))
        # Few and large claims: each of many small ones would cost a round trip.
        few = room <= 0 or (room < limit // 2 and not self._workers.is_starving)
        # These go to the head of the queue, so claim no more of them than workers.
        hurried = 2 * self._workers.size - flying if self._claimer.wanted.hurried else 0
        if few and hurried <= 0:
            return Batch(), Batch()
        claim = self._claimer.prepare(0 if few else room, hurried)
        jump = None if few else self._claimer.prepare_jump(room)
        return (
            Batch([(claim, self._read_claim)] if claim else ()),
            Batch([(jump, partial(self._read_jump, jump))] if jump else ()),
        )

    def _settled(self) -> None:
        """The outcomes are written, or there were none."""
        if startable := self._settler.settle():
            self._put(startable)
        self._hand_over.note_written()

    def _measure(self) -> None:
        if self._meter:
            self._meter.measure()

    def _read_jump(self, jump: Statement, rows: list[tuple[Any, ...]]) -> None:
        self._claimer.read_jump(jump[1], JumpRow(*rows[0]))

    def _read_claim(self, rows: list[tuple[Any, ...]]) -> None:
        items, outcomes = self._claimer.read(rows)
        self._settler.early += outcomes
        if self._claimer.scope.was_skipped:
            self._poller.poll_soon(SKIP_PAUSE)
        urgent = self._claimer.urgent
        if items or urgent:
            self._poller.poll_soon()
        if urgent:
            self._put(urgent, first=True)
        if items:
            self._put(items)

    def _put(self, items: Sequence[Item], *, first: bool = False) -> None:
        self._put_at = time.monotonic()
        hungry = self._workers.is_starving
        self._workers.put(items, first=first)
        if hungry:
            _yield()

    def _sleep(self) -> None:
        self._measure()
        if time.monotonic() - self._put_at > _HOARDED:
            self._take_back()
        seconds = self._poller.seconds_left()
        if self._limiter and self._takes_slots:
            seconds = min(seconds, self._limiter.seconds_left())
        if self._finished or self._settler.waits_until:
            seconds = min(seconds, SETTLE_WITHIN)
        elif self._claimer.is_barred:
            seconds = min(seconds, _BARRED)
        if self._claimer.gated.gate is not None:
            seconds = min(seconds, LOOK_SECONDS)
        for origin in self._wakeup.wait(seconds):
            self._hear(origin)
        if self._wakeup.turns != self._turns:
            # Hints sent meanwhile are lost, and all dispatchers poll at another pace.
            # `receives_hints` cannot show it: another thread may have seen the change.
            self._turns = self._wakeup.turns
            self._hear("")

    def _hear(self, origin: str) -> None:
        self._claimer.windows.hint(origin)
        if self._hinted is not None and self._hinted(origin):
            _yield()

    def _take_back(self) -> None:
        """Release jobs that have waited for long.

        They may run elsewhere, and a crash of this process cannot touch them.
        """
        self._put_at = time.monotonic()
        self._take_back_ready()
        for lane in self._claimer.in_flight.lanes.values():
            self._claimer.in_flight.shorten(lane)

    def _take_back_ready(self) -> None:
        for item in self._workers.take_back(self._finished):
            self._claimer.take_back(item)

    def _release_old(self) -> None:
        """The same for jobs of old claims, while workers begin and end others."""
        now = time.monotonic()
        if now < self._aged_at:
            return
        self._aged_at = now + _HOARDED / 2
        last, self._aged = self._aged, self._claimer.seq
        in_flight = self._claimer.in_flight
        old = in_flight.find_old(last)
        # Behind a limit a job waits for its value, and delays no other.
        if old.waits and self._limiter is None:
            # The younger ones, too: otherwise they would overtake the old ones.
            self._take_back_ready()
        for lane in old.lanes:
            in_flight.shorten(lane)

    def _cancel(self) -> None:
        """Ask running jobs to stop, because somebody has cancelled them."""
        for job_id in self._poller.cancelled:
            job = self._claimer.in_flight.jobs.get(job_id)
            if job is not None and not job.cancel_requested:
                job.cancel_requested = True
                self._workers.cancel(job)


def _yield() -> None:
    """Let the thread that was just woken run: this one's next step can wait."""
    time.sleep(0)
