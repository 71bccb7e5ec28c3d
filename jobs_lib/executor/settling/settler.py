"""What has ended, on its way into the database."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.executor.batch import Batch, Question, ignore
from jobs_lib.executor.lane import Result
from jobs_lib.executor.settling.failures import report_failures
from jobs_lib.executor.settling.losses import Losses
from jobs_lib.postgres.values import int_array

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs_lib.executor.claiming.claimer import Claimer
    from jobs_lib.executor.claiming.pace import Pace
    from jobs_lib.executor.lane import ClaimedJob, Lane, Outcome
    from jobs_lib.executor.meter import Meter
    from jobs_lib.executor.settling.completer import Completer, Settlement

SETTLE_WITHIN = 0.005
"""Seconds that a few completed jobs wait for more of them."""
_WAITING = {Result.RETRIED, Result.SNOOZED, Result.DISCARDED, Result.DROPPED}


class Settler:
    """Collects what has ended, has it written, and frees its places.

    Used by the dispatcher's thread. What is not known to be written stays here, and
    goes into the next round's batch once more.
    """

    def __init__(
        self,
        claimer: Claimer,
        completer: Completer,
        pace: Pace,
        meter: Meter | None,
    ) -> None:
        """Wait for what ends.

        Args:
            claimer: has claimed it.
            completer: says how it is written.
            pace: notes how many jobs have ended.
            meter: counts the outcomes of jobs; None not to count.
        """
        self.completed: list[ClaimedJob] = []
        self.outcomes: list[Outcome] = []
        self.early: list[Outcome] = []
        """What a claim settled without a run; for the next round."""
        self.waits_until = 0.0
        """Until when a few completed jobs wait for more of them."""
        self._claimer = claimer
        self._completer = completer
        self._pace = pace
        self._meter = meter
        self._finished = claimer.finished
        self._losses = Losses(completer.types)
        self._connected_at = time.monotonic()
        self._ended_lanes: list[Lane] = []
        self._judged: list[Outcome] = []
        """The outcomes, in the form in which they will be written."""
        self._doubtful = False
        """Whether unsettled outcomes may have been written already."""
        self._told: set[int] = set()
        """Jobs in flight that were reported as dropped."""
        self._trimmed = 0
        """How many of those given back are being taken out of their claims."""

    def note_connected(self) -> None:
        """The dispatcher has a new connection."""
        self._connected_at = time.monotonic()

    def doubt(self) -> None:
        """Note a lost answer: unsettled outcomes may have been written."""
        self._doubtful = True

    # What has ended

    def __len__(self) -> int:
        return len(self.completed) + len(self.outcomes)

    def collect(self) -> None:
        """Take what has ended since the last time."""
        completed, outcomes, lanes = self._finished.take()
        self.completed += completed
        self.outcomes += outcomes + self.early
        self._ended_lanes += lanes
        self.early = []
        self.tell_dropped(_find_late(outcomes))
        self._pace.note(len(completed) + len(outcomes))
        self._finished.wake_at = max(1, self._pace.limit // 8)

    def tell_dropped(self, ids: set[int]) -> None:
        """Report once the jobs in memory that did not begin: others may have them."""
        if fresh := ids - self._told:
            self._told |= fresh
            telemetry.emit("jobs.dropped", ids=sorted(fresh))

    def is_too_little(self, *, starving: bool) -> bool:
        """Whether what has ended may wait for company while others run.

        A round trip for one job takes half of the time of one for hundreds.

        Args:
            starving: whether a worker has nothing to run.
        """
        few = 0 < len(self.completed) < self._finished.wake_at and not self.outcomes
        if not few or self._ended_lanes or starving:
            self.waits_until = 0.0
            return False
        now = time.monotonic()
        self.waits_until = self.waits_until or now + SETTLE_WITHIN
        return now < self.waits_until

    # What is written

    def prepare(self) -> Batch:
        """The questions that write the outcomes; none if there are no outcomes."""
        self._judged = self._losses.judge(self.outcomes, self._connected_at)
        settlements = self._completer.prepare(
            self.completed, self._judged, self._claimer.epochs
        )
        questions: list[Question] = [
            ((one.query, one.parameters), partial(self._read, one))
            for one in settlements
        ]
        return Batch(questions + self._trim_claims())

    def _trim_claims(self) -> list[Question]:
        """Take jobs that do not run under their claims out of them."""
        in_flight = self._claimer.in_flight
        # A job that waits for another attempt must not pay if this process dies before
        # the other jobs of its claim have ended.
        waiting = [o.job for o in self.outcomes if o.result in _WAITING]
        # Nor must the jobs behind it: a cancel sees by the claims, at the same moment,
        # that their group stands still.
        behind = [j for job in waiting if job.group for j in list(job.lane.jobs)]
        released = in_flight.released + waiting + behind
        self._trimmed = len(in_flight.released)
        if not released:
            return []
        # A look from the start, such as after a pause, finds jobs in flight again, and
        # names them in another claim.
        seqs = {job.lane.seq for job in released}.union(in_flight.claims)
        # If its origin was given back and taken again since, another claim has it now.
        flying = in_flight.jobs
        ids = [job.id for job in released if flying.get(job.id, job) is job]
        parameters = {"seqs": int_array(sorted(seqs)), "ids": int_array(ids)}
        trim = "trim_claims", {"owner": self._claimer.owner, **parameters}
        return [(trim, ignore)]

    def end_claims(self) -> list[Question]:
        """Remove the claims whose jobs have ended; not worth a round trip alone."""
        seqs = self._claimer.in_flight.ended_claims()
        if not seqs:
            return []
        ended = {"owner": self._claimer.owner, "seqs": int_array(seqs)}
        return [(("end_claims", ended), ignore)]

    def _read(self, settlement: Settlement, rows: list[tuple[Any, ...]]) -> None:
        jobs = self._completer.read(settlement, rows, again=self._doubtful)
        if settlement.query == "retry" and len(jobs) < len(settlement.jobs):
            written = {job.id for job in jobs}
            for job in settlement.jobs:
                # Its own transaction may have completed it, or somebody cancelled it.
                # Then it is no longer the head that its group waits for.
                if job.group is not None and job.id not in written:
                    job.lane.anew = True
        if self._meter:
            self._meter.add_written(settlement.result.value, jobs)

    def settle(self) -> list[Lane]:
        """Free the places of what is written; returns lanes that may start now."""
        if self._meter:
            self._add_ended(self._meter)
        self._losses.note(self.completed, self._judged)
        report_failures(self._judged)
        in_flight = self._claimer.in_flight
        for job in self.completed:
            in_flight.remove(job)
        freed: list[Lane] = []
        for outcome in self.outcomes:
            in_flight.remove(outcome.job)
            if outcome.frees is not None:
                freed.append(outcome.frees)
            if outcome.result is Result.DROPPED:
                self._claimer.claim_again(outcome.job)
            elif outcome.result is Result.RETRIED:
                self._claimer.note_failed(outcome.job)
        # Jobs that this same round's claim has given back are still in their claims.
        del in_flight.released[: self._trimmed]
        self._trimmed = 0
        for lane in self._ended_lanes + [lane for lane in freed if not lane.jobs]:
            # What stood behind a failed job has not run: a crash is not its business.
            flying = in_flight.jobs
            in_flight.released += [j for j in lane.jobs if flying.get(j.id) is j]
            in_flight.end_lane(lane)
        self.completed, self.outcomes, self._ended_lanes = [], [], []
        self._told &= in_flight.jobs.keys()
        self._claimer.note_ended()
        self._doubtful = False
        return [lane for lane in freed if lane.jobs]

    def _add_ended(self, meter: Meter) -> None:
        """Count what its own transaction has completed, and time all that has ended."""
        own = Result.COMMITTED
        committed = [o.job for o in self.outcomes if o.result is own]
        meter.add_written("completed", committed)
        meter.add_ended(self.completed)
        ran = (outcome.job for outcome in self.outcomes if outcome.ran)
        meter.add_ended([job for job in ran if job.ended])


def _find_late(outcomes: Iterable[Outcome]) -> set[int]:
    """What did not begin since the lease was over, and what stands behind it."""
    late = [o.job for o in outcomes if o.result is Result.DROPPED and o.error]
    behind = (job.id for one in late for job in one.lane.jobs.copy())
    return {job.id for job in late}.union(behind) if late else set()
