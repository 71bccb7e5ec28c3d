"""Settle claimed jobs without a run: superseded, put off, or the cause of crashes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib.executor.claiming.last_only import LastOnly, Superseding, supersede
from jobs_lib.executor.claiming.suspects import GUILTY, SUSPECT, explain_crashes
from jobs_lib.executor.lane import Result

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping

    from jobs_lib.executor.claiming.found import Found
    from jobs_lib.executor.claiming.in_flight import Group, InFlight
    from jobs_lib.executor.lane import Item, Lane, Outcome
    from jobs_lib.jobs.type import JobType


class EarlyEnds:
    """Which jobs of a claim end before they start; used by one thread."""

    def __init__(
        self,
        types: Mapping[str, JobType[Any]],
        section: Collection[str],
        in_flight: InFlight,
    ) -> None:
        """Know of no group that waits.

        Args:
            types: the handlers, by the name of their type.
            section: the types that are claimed.
            in_flight: loses the jobs that will not run under their claim.
        """
        self._types = types
        self._in_flight = in_flight
        self._last = {
            name: LastOnly(t.debounce, t.max_wait)
            for name, t in types.items()
            if t.last_only and name in section
        }
        self._superseding = Superseding()

    def parameters(self) -> dict[str, Any]:
        """The queries' parameter with the types that run last only."""
        return {"last_types": list(self._last)}

    def is_last_only(self, type_: str) -> bool:
        """Whether only the last job of a group runs, for this type."""
        return type_ in self._last

    def is_pile(self, group: Group) -> bool:
        """Whether a group waits for a job that runs last only."""
        return group in self._superseding

    def release(self, origins: Container[str]) -> None:
        """Forget groups of origins."""
        self._superseding.release(origins)

    def settle(self, found: Found) -> tuple[list[Item], list[Outcome]]:
        """The jobs that may start, and the outcomes settled without a run."""
        outcomes = [
            outcome
            for lane in found.lanes.values()
            for outcome in self._settle_lane(lane, found)
        ]
        outcomes += [
            explain_crashes(job, self._types[job.type].retry)
            for job in found.jobs
            if job.crashes >= GUILTY and job.group is None
        ]
        items = found.items
        if outcomes:
            held = {id(o.frees) for o in outcomes} | {id(o.job) for o in outcomes}
            items = [item for item in items if id(item) not in held]
        return items, outcomes

    def _settle_lane(self, lane: Lane, found: Found) -> list[Outcome]:
        """The jobs of a lane that are settled before its rest may start."""
        head = lane.jobs[0]
        before = list(lane.jobs)
        if head.crashes >= GUILTY:
            ends = [explain_crashes(head, self._types[head.type].retry)]
            lane.jobs.clear()
            lane.failed = ends[0].result is Result.RETRIED
        # A suspect is alone in its lane, so the lane cannot show whether it is the
        # last.
        elif found.ages and head.crashes < SUSPECT:
            newer = found.newer.get((lane.origin, str(lane.group)))
            ends = supersede(lane, self._last, found.ages, self._superseding, newer)
        else:
            return []
        kept = {id(job) for job in lane.jobs} | {id(end.job) for end in ends}
        for job in before:
            if id(job) not in kept:
                self._in_flight.release_job(job)
        if ends:
            ends[-1].frees = lane
        elif not lane.jobs:
            self._in_flight.end_lane(lane)
        return ends


def keep_one_value(lane: Lane, in_flight: InFlight) -> None:
    """Leave in a lane only jobs with its first job's value: one start is counted."""
    if not lane.jobs:
        return
    head, *behind = lane.jobs
    lane.value = head.value or ""
    for place, job in enumerate(behind, 1):
        if job.value != head.value:
            lane.more, lane.last = True, job.id - 1
            for other in behind[place - 1 :]:
                in_flight.release_job(other)
                lane.jobs.pop()
            return
