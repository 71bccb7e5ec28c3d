"""A dispatcher: one thread that talks to the database.

It settles what has ended and claims more, both in one round trip, while the workers run
what was claimed before. Between two rounds it sleeps until something ends, until there
is a hint of new work, or until it is time to look by itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.errors import UnavailableError
from jobs_lib.executor.claiming.claimer import SKIP_PAUSE
from jobs_lib.executor.claiming.in_flight import name_rows
from jobs_lib.executor.claiming.polling import Poller
from jobs_lib.executor.lane import Result
from jobs_lib.executor.round_trip import RoundTrip
from jobs_lib.executor.settling.failures import tell_failures
from jobs_lib.executor.settling.losses import Losses
from jobs_lib.postgres.values import int_array
from jobs_lib.postgres.wakeup import Wakeup
from jobs_lib.telemetry.liveness import Pulse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from jobs_lib.executor.claiming.claimer import Claimer, Item
    from jobs_lib.executor.claiming.pace import Pace
    from jobs_lib.executor.lane import ClaimedJob, Lane, Outcome
    from jobs_lib.executor.limiting.limiter import Limiter
    from jobs_lib.executor.meter import Meter
    from jobs_lib.executor.round_trip import Answer, Statement
    from jobs_lib.executor.running.workers import WorkerPool
    from jobs_lib.executor.section import Section
    from jobs_lib.executor.settling.completer import Completer, Settlement
    from jobs_lib.postgres.database import Database

    Share = Callable[
        [
            "Dispatcher",
            Sequence[tuple[str, str, str | None]],
            Sequence[tuple[str, int, str | None, str]],
        ],
        None,
    ]

_SETTLE_WITHIN = 0.005
_WAITING = {Result.RETRIED, Result.SNOOZED, Result.DISCARDED, Result.DROPPED}
_BARRED = 0.05
"""Seconds between two looks whether the process has its lease back."""
_HOARDED = 1.0
"""Seconds that a claimed job may wait for a worker before it is given back."""


class Dispatcher:
    """Claims and settles the jobs of some origins."""

    def __init__(
        self,
        database: Database,
        claimer: Claimer,
        completer: Completer,
        workers: WorkerPool,
        pace: Pace,
        poll_interval: float,
        hinted: Callable[[str], None] | None,
        hears: Callable[[], bool],
        meter: Meter | None = None,
        limiter: Limiter | None = None,
        share: Share | None = None,
        *,
        takes_slots: bool = True,
    ) -> None:
        """Prepare to dispatch.

        Args:
            database: where the jobs are.
            claimer: claims some of them.
            completer: settles them.
            workers: runs them.
            pace: says how many may be in flight.
            poll_interval: seconds between two looks, when idle.
            hinted: is told the hints that may be others' business; None not to listen
                to any.
            hears: says whether hints can come now, whoever listens.
            meter: counts what becomes of the jobs; None not to count.
            limiter: stands before the workers where the jobs' type has a limit.
            share: tells the other sections of the executor what concerns them.
            takes_slots: whether it asks for the limiter's slots; one of all that share
                the limiter does.
        """
        self._database = database
        self._claimer = claimer
        self._completer = completer
        self._workers: WorkerPool | Limiter = limiter or workers
        self._limiter = limiter
        self._takes_slots = limiter is not None and takes_slots
        self._share = share
        self._pace = pace
        self._poller = Poller(claimer, poll_interval)
        listens = database.listens and hinted is not None
        self._wakeup = Wakeup(database, database.channel if listens else None)
        self._turns = 0
        self._hinted = hinted
        self._hears = hears
        self._meter = meter
        self._finished = claimer.finished
        self._finished.wake = self._wakeup.set
        self._commands: deque[Callable[[], None]] = deque()
        self._completed: list[ClaimedJob] = []
        self._outcomes: list[Outcome] = []
        self._early: list[Outcome] = []
        """What a claim settled without a run; for the next round."""
        self._ended_lanes: list[Lane] = []
        self._losses = Losses(completer.types)
        self._connected_at = time.monotonic()
        self._judged: list[Outcome] = []
        """The outcomes as they are to be written."""
        self._doubtful = False
        """Whether what is to be settled may have been written already."""
        self._leaving: list[threading.Event] = []
        """Told as soon as what was given back is written."""
        self._told: set[int] = set()
        """Jobs in flight that were told as dropped."""
        self._trimmed = 0
        """How many of those given back are being taken out of their claims."""
        self._waits_until = 0.0
        """Until when a few completed jobs wait for more of them."""
        self._put_at = 0.0
        self._quiescing = False
        self._cut_off = False
        """Whether the time of what runs is over: nobody waits for it once more."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._dispatch, name="jobs_lib dispatcher", daemon=True
        )
        self.pulse = Pulse(self._thread.name, self._thread.is_alive)

    def start(self) -> None:
        """Start the thread; nothing is claimed until origins are acquired."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Call after the origins have been released."""
        self._stopping.set()
        self._wakeup.set()
        self._thread.join()

    def wake(self) -> None:
        """Look whether there is something to do, from any thread."""
        self._wakeup.set()

    @property
    def running(self) -> list[ClaimedJob]:
        """The jobs that were begun and are not settled, asked from any thread."""
        # Listed at once: its own thread may change it meanwhile.
        return [job for job in [*self._claimer.in_flight.jobs.values()] if job.started]

    def take(self, origins: Mapping[str, int]) -> None:
        """Start to claim from origins at these epochs."""

        def join() -> None:
            self._claimer.take(origins)
            if self._quiescing:
                self._claimer.stop_claiming(origins)
            # Look first: something may be paused.
            self._poller.poll_soon(0.0)

        self._do(join)

    def hurry(self, jobs: Mapping[int, str]) -> None:
        """Claim these first: ids, with their origins."""
        self._do(lambda: self._claimer.hurry(jobs))

    def quiesce(self, deadline: float) -> Callable[[], list[int]]:
        """Claim nothing more; the function returned waits for what is running."""
        quiet = threading.Event()
        unfinished: list[int] = []
        self._quiescing = True

        def begin() -> None:
            # Whoever stops this process by force must not burn what it interrupts.
            self._claimer.given_back += self._claimer.stop_claiming(
                self._claimer.epochs
            )
            leave()

        def leave() -> None:
            jobs = self._claimer.stop_claiming(self._claimer.epochs)
            unfinished[:] = [job.id for job in jobs if job.started]
            if unfinished and time.monotonic() < deadline:
                self._commands.append(leave)
            else:
                self._cut_off = bool(unfinished)
                quiet.set()

        def wait() -> list[int]:
            quiet.wait(max(0.0, deadline - time.monotonic()) + 1.0)
            return unfinished

        self._do(begin)
        return wait

    def release(self, origins: frozenset[str], deadline: float) -> Callable[[], None]:
        """Stop claiming from origins; the function returned waits for what is running.

        What of them has ended by then is settled.
        """
        quiet = threading.Event()
        # At once: the dispatcher may be waiting for the database.
        self._claimer.stop_claiming(origins)

        def leave() -> None:
            jobs = self._claimer.stop_claiming(origins)
            running = any(job.started for job in jobs) and not self._cut_off
            if running and time.monotonic() < deadline and not self._stopping.is_set():
                # Again after the next outcome: settled under the epoch we still have.
                self._commands.append(leave)
            else:
                self._claimer.given_back += self._claimer.release(origins)
                self._leaving.append(quiet)

        def wait() -> None:
            # A dispatcher that cannot reach the database must not hold up a hand-over.
            quiet.wait(max(0.0, deadline - time.monotonic()) + 1.0)

        self._do(leave)
        return wait

    def lose(self, origins: frozenset[str]) -> None:
        """Begin nothing more of origins that others have taken: a release follows.

        At once: the dispatcher may be waiting for the database.
        """
        jobs = self._claimer.stop_claiming(origins)
        late = {job.id for job in jobs if not job.started}
        # Those that have landed by then were told before.
        self._do(lambda: self._tell_dropped(late & self._claimer.in_flight.jobs.keys()))

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wakeup.set()

    # The dispatcher's thread

    def _dispatch(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            self.pulse.beat()
            try:
                with self._database.connect("executor", impatient=True) as connection:
                    self._connected_at = time.monotonic()
                    round_trip = RoundTrip(
                        connection,
                        self._database.queries,
                        prepare=self._database.prepares,
                    )
                    self._recover(round_trip)
                    while not self._stopping.is_set():
                        self._round(round_trip)
                        failures = 0
                    self._round(round_trip)
            except BaseException as error:
                failures += 1
                self._doubtful = True
                self._collect()
                telemetry.emit("loop.failed", loop="executor", error=error)
                self._stopping.wait(RECONNECT.delay(failures))
        self._wakeup.close()

    def _recover(self, round_trip: RoundTrip) -> None:
        """Trust nothing that was known: a server has come that may lack commits."""
        self._take_back()
        self._claimer.doubt()
        self._poller.doubt()
        claimer, flying = self._claimer, [*self._claimer.in_flight.jobs.values()]
        owner = {"owner": claimer.owner}
        ids = int_array(job.id for job in flying)
        # A claim whose answer was lost took nothing; its row must not say else.
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

    def _round(self, round_trip: RoundTrip) -> None:
        self.pulse.beat()
        for _ in range(len(self._commands)):
            self._commands.popleft()()
        self._collect()
        polls = self._poller.prepare(
            busy=len(self._claimer.in_flight) > 0, hinted=self._hears()
        )
        claim, jump = self._prepare_claim()
        slots = []
        if self._limiter and self._takes_slots:
            slots = self._limiter.prepare()
        hurried = bool(self._leaving) or self._stopping.is_set()
        idle = not (polls or claim or jump or slots or hurried)
        if idle and self._is_too_little():
            self._sleep()
            return
        self._judged = self._losses.judge(self._outcomes, self._connected_at)
        settlements = self._completer.prepare(
            self._completed, self._judged, self._claimer.epochs
        )
        settle: list[Statement] = [(s.query, s.parameters) for s in settlements]
        settle += self._trim_claims()
        if not settle:
            # Committed in a job's own transaction, or dropped: nothing to write.
            self._settled([], [])
        if settle or polls or claim or hurried:
            settle += self._end_claims()
        # The claim sees what the jump has seen.
        batches = [b for b in (settle, slots, *polls, jump, claim) if b]
        if not batches:
            self._sleep()
            return
        answers, failure = round_trip.exchange(*batches, meanwhile=self._measure)
        answers += [None] * (len(batches) - len(answers))
        found = dict(zip(map(id, batches), answers, strict=True))
        # The claim first: what it passed over belongs to lanes that may have ended.
        if claim and (answer := found[id(claim)]) is not None:
            self._claimed(answer)
        if jump and (answer := found[id(jump)]) is not None:
            self._claimer.read_jump(jump[0][1], answer[0][0])
        if settle and (answer := found[id(settle)]) is not None:
            self._settled(settlements, answer)
        if self._limiter and slots and (answer := found[id(slots)]) is not None:
            self._limiter.read(slots, answer)
        for batch in polls:
            if (answer := found[id(batch)]) is not None:
                self._poller.read(batch, answer)
        if self._share and (self._claimer.shared or self._poller.due):
            self._share(self, self._claimer.shared, self._poller.due)
            self._claimer.shared, self._poller.due = [], []
        if self._poller.cancelled:
            self._cancel()
        if failure:
            raise failure

    def _collect(self) -> None:
        completed, outcomes, lanes = self._finished.take()
        self._completed += completed
        self._outcomes += outcomes + self._early
        self._ended_lanes += lanes
        self._early = []
        self._tell_dropped(_find_late(outcomes))
        self._pace.note(len(completed) + len(outcomes))
        self._finished.wake_at = max(1, self._pace.limit // 8)

    def _tell_dropped(self, ids: set[int]) -> None:
        """Tell, once, what was in memory and did not begin: others may have it."""
        if fresh := ids - self._told:
            self._told |= fresh
            telemetry.emit("jobs.dropped", ids=sorted(fresh))

    def _is_too_little(self) -> bool:
        """Whether what has ended may wait for company while others run.

        A round trip for one job takes half of the time of one for hundreds.
        """
        few = 0 < len(self._completed) < self._finished.wake_at and not self._outcomes
        if not few or self._ended_lanes or self._workers.is_starving:
            self._waits_until = 0.0
            return False
        now = time.monotonic()
        self._waits_until = self._waits_until or now + _SETTLE_WITHIN
        return now < self._waits_until

    def _trim_claims(self) -> list[Statement]:
        """Take out of the claims what does not run under them."""
        # What waits for another attempt must not pay when this process dies before the
        # others of its claim have ended.
        waiting = [o.job for o in self._outcomes if o.result in _WAITING]
        # Nor what stands behind it: who cancels it sees by the claims that its group
        # stands still, in the same moment.
        behind = [j for job in waiting if job.group for j in list(job.lane.jobs)]
        given_back = self._claimer.given_back + waiting + behind
        self._trimmed = len(self._claimer.given_back)
        if not given_back:
            return []
        # A look from the start on, such as after a pause, finds what is in flight once
        # more, and names it in another claim.
        seqs = {job.lane.seq for job in given_back}.union(
            self._claimer.in_flight.claims
        )
        ids = [job.id for job in given_back]
        parameters = {"seqs": int_array(sorted(seqs)), "ids": int_array(ids)}
        return [("trim_claims", {"owner": self._claimer.owner, **parameters})]

    def _end_claims(self) -> list[Statement]:
        """Remove the claims whose jobs have ended; not worth a round trip alone."""
        seqs = self._claimer.in_flight.ended_claims()
        if not seqs:
            return []
        return [("end_claims", {"owner": self._claimer.owner, "seqs": int_array(seqs)})]

    def _prepare_claim(self) -> tuple[list[Statement], list[Statement]]:
        """A claim, and a jump past what cannot run; either may be empty."""
        if self._claimer.is_barred:
            return [], []
        # What has ended lands in this same round trip.
        ended = len(self._completed) + len(self._outcomes)
        limit, flying = self._pace.limit, len(self._claimer.in_flight) - ended
        if self._limiter and (stuck := self._limiter.count_stuck(self._finished)):
            if stuck >= self._pace.most:
                return [], []
            # They wait for their own values, and keep back no others.
            flying -= stuck
        # Slow jobs: what the other dispatcher leaves idle is for this one's origins.
        room = max(limit - flying, min(self._workers.idle, self._pace.most - flying))
        # Few and large claims: a trickle of small ones costs a round trip each.
        few = room <= 0 or (room < limit // 2 and not self._workers.is_starving)
        # They wait at the head of the queue: no more of them than workers.
        hurried = 2 * self._workers.size - flying if self._claimer.hurried else 0
        if few and hurried <= 0:
            return [], []
        claim = self._claimer.prepare(0 if few else room, hurried)
        jump = None if few else self._claimer.prepare_jump(room)
        return [claim] if claim else [], [jump] if jump else []

    def _settled(self, settlements: list[Settlement], answer: Answer) -> None:
        for settlement, rows in zip(settlements, answer, strict=False):
            jobs = self._completer.read(settlement, rows, again=self._doubtful)
            if self._meter:
                self._meter.add_written(settlement.result.value, jobs)
        if self._meter:
            self._add_ended(self._meter)
        self._losses.note(self._completed, self._judged)
        tell_failures(self._judged)
        in_flight = self._claimer.in_flight
        for job in self._completed:
            in_flight.remove(job)
        freed: list[Lane] = []
        for outcome in self._outcomes:
            in_flight.remove(outcome.job)
            if outcome.frees is not None:
                freed.append(outcome.frees)
            if outcome.result is Result.DROPPED:
                self._claimer.look_again(outcome.job)
            elif outcome.result is Result.RETRIED:
                self._claimer.note_failed(outcome.job)
        # What the claim of this same round has given back is still to be told.
        del self._claimer.given_back[: self._trimmed]
        self._trimmed = 0
        for lane in self._ended_lanes + [lane for lane in freed if not lane.jobs]:
            # What stood behind a failed job has not run: a crash is not its business.
            self._claimer.given_back += [j for j in lane.jobs if j.id in in_flight.jobs]
            in_flight.end_lane(lane)
        self._completed, self._outcomes, self._ended_lanes = [], [], []
        self._told &= in_flight.jobs.keys()
        self._claimer.note_ended()
        self._doubtful = False
        if startable := [lane for lane in freed if lane.jobs]:
            self._put(startable)
        for event in self._leaving:
            event.set()
        self._leaving.clear()

    def _measure(self) -> None:
        if self._meter:
            self._meter.measure()

    def _add_ended(self, meter: Meter) -> None:
        """Count what its own transaction has completed, and time all that has ended."""
        own = Result.COMMITTED
        committed = [o.job for o in self._outcomes if o.result is own]
        meter.add_written("completed", committed)
        meter.add_ended(self._completed)
        ran = (outcome.job for outcome in self._outcomes if outcome.ran)
        meter.add_ended([job for job in ran if job.ended])

    def _claimed(self, answer: Answer) -> None:
        items, outcomes = self._claimer.read(answer[0])
        self._early += outcomes
        if self._claimer.was_skipped:
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
        if self._finished or self._waits_until:
            seconds = min(seconds, _SETTLE_WITHIN)
        elif self._claimer.is_barred:
            seconds = min(seconds, _BARRED)
        for origin in self._wakeup.wait(seconds):
            self._hear(origin)
        if self._wakeup.turns != self._turns:
            # What was said meanwhile is lost; and everybody looks at another pace. Not
            # asked of `hears`: it may have been true for others, and only in between.
            self._turns = self._wakeup.turns
            self._hear("")

    def _hear(self, origin: str) -> None:
        self._claimer.windows.hint(origin)
        if self._hinted is not None and origin not in self._claimer.cursors:
            self._hinted(origin)
            _yield()

    @property
    def hears(self) -> bool:
        """Whether it can hear hints now; asked from any thread."""
        return self._wakeup.hears

    def follow(self, groups: Sequence[tuple[str, str, bool]]) -> None:
        """Another section says that these may go on here, from any thread.

        Args:
            groups: origin, group, and whether its next job is of this section.
        """

        def follow() -> None:
            for origin, group, at_once in groups:
                self._claimer.follow(origin, group, at_once=at_once)

        self._do(follow)

    def take_due(self, rows: Sequence[tuple[str, int, str | None, str]]) -> None:
        """Another section has found these due, from any thread."""
        self._do(lambda: self._claimer.take_due(rows))

    @property
    def section(self) -> Section:
        """The types that it claims."""
        return self._claimer.section

    @property
    def lacks_slots(self) -> bool:
        """Whether jobs that it has claimed wait for their limit."""
        return self._limiter is not None and self._limiter.lacks_slots

    def hint(self, origin: str) -> None:
        """Somebody says that there is something new in an origin, from any thread."""
        self._do(lambda: self._claimer.windows.hint(origin))

    def _take_back(self) -> None:
        """What has waited for long may run elsewhere, and is not cut off by a crash."""
        self._put_at = time.monotonic()
        for item in self._workers.take_back(self._finished):
            self._claimer.take_back(item)
        for lane in self._claimer.in_flight.lanes.values():
            self._claimer.shorten(lane)

    def _cancel(self) -> None:
        """Tell running jobs that somebody asked them to stop."""
        for job_id in self._poller.cancelled:
            job = self._claimer.in_flight.jobs.get(job_id)
            if job is not None and not job.cancel_requested:
                job.cancel_requested = True
                self._workers.cancel(job)


def _find_late(outcomes: Iterable[Outcome]) -> set[int]:
    """What did not begin since the lease was over, and what stands behind it."""
    late = [o.job for o in outcomes if o.result is Result.DROPPED and o.error]
    behind = (job.id for one in late for job in one.lane.jobs.copy())
    return {job.id for job in late}.union(behind) if late else set()


def _yield() -> None:
    """Let the thread run that was just woken: what this one does next can wait."""
    time.sleep(0)
