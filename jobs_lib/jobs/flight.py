"""What an executor has in flight: jobs, their lanes, and the claims they are of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs_lib.jobs.model import Job, Lane

Group = tuple[str, str]
"""Origin and group."""


class Flight:
    """Claimed jobs whose outcome is not written yet; used by one thread."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.lanes: dict[Group, Lane] = {}
        """The lanes of groups: no second one of a group may start."""
        self.behind: dict[Group, int] = {}
        """Groups that go on behind the lane that has just ended, after this id."""
        self.late: dict[int, str] = {}
        """Jobs that came late to a group whose lane has ended: id and origin."""
        self._left: dict[int, int] = {}
        """Jobs still in flight of each claim, by its number."""

    def __len__(self) -> int:
        return len(self.jobs)

    def count(self, seq: int, jobs: int) -> None:
        """So many jobs of one claim have taken off."""
        self._left[seq] = jobs

    def land(self, job: Job) -> None:
        """The job's outcome is written, or it is given back."""
        # It may have been claimed anew since, by an epoch after this one's.
        if self.jobs.get(job.id) is job:
            del self.jobs[job.id]
            self._left[job.lane.seq] -= 1

    def end_lane(self, lane: Lane) -> None:
        """Nothing of a group's lane runs any more; its group may go on."""
        key = (lane.origin, lane.group or "")
        if self.lanes.get(key) is lane:
            del self.lanes[key]
            if lane.after and not lane.dropped:
                self.behind[key] = lane.after
            elif lane.more and not (lane.failed or lane.dropped):
                self.behind[key] = lane.last
            if lane.late:
                self.late[lane.late] = lane.origin
        for job in lane.jobs:
            self.land(job)

    def leave(self, origins: frozenset[str]) -> list[Job]:
        """Forget what is in flight of these origins; returns it."""
        gone = [job for job in self.jobs.values() if job.lane.origin in origins]
        for job in gone:
            self.land(job)
        self.lanes = {k: v for k, v in self.lanes.items() if k[0] not in origins}
        self.behind = {k: v for k, v in self.behind.items() if k[0] not in origins}
        return gone

    def ended_claims(self) -> list[int]:
        """The claims of which nothing is in flight any more, each named once."""
        ended = [seq for seq, left in self._left.items() if left == 0]
        for seq in ended:
            del self._left[seq]
        return ended

    @property
    def claims(self) -> list[int]:
        """The claims of which something is in flight."""
        return list(self._left)
