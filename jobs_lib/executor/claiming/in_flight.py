"""An executor's jobs in flight, with their lanes and their claims."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jobs_lib.executor.lane import ClaimedJob, Lane

Group = tuple[str, str]
"""Origin and group."""


def name_rows(jobs: Sequence[ClaimedJob]) -> dict[str, Any]:
    """The parameters of the query ``find_overtaken``: how these jobs were claimed."""
    return {
        "origins": [job.origin for job in jobs],
        "groups": [job.group for job in jobs],
        "ids": [job.id for job in jobs],
        "times": [job.enqueued for job in jobs],
    }


class Old(NamedTuple):
    """What is left of old claims."""

    waits: bool
    """Whether a job or a lane of them waits for a worker."""
    lanes: list[Lane]
    """Their lanes that a worker goes through."""


class InFlight:
    """Claimed jobs whose outcome is not written yet; used by one thread."""

    def __init__(self) -> None:
        self.jobs: dict[int, ClaimedJob] = {}
        self.lanes: dict[Group, Lane] = {}
        """The lanes of groups: no group may start a second one."""
        self.behind: dict[Group, int] = {}
        """Groups whose lane has just ended, and the id after which they go on."""
        self.late: dict[int, str] = {}
        """Jobs to ask for by id, with their origin: they came late to a group whose
        lane has ended, or ran on after their origin was released."""
        self.lingering: dict[int, ClaimedJob] = {}
        """Jobs without a group that run on after their origin was released. They are
        not in flight, and must not be started a second time meanwhile."""
        self.released: list[ClaimedJob] = []
        """Claimed jobs that will not run under this claim."""
        self._left: dict[int, int] = {}
        """How many jobs of each claim are still in flight, by its number."""

    def __len__(self) -> int:
        return len(self.jobs)

    def add_claim(self, seq: int, jobs: int) -> None:
        """Add a number of jobs of one claim."""
        self._left[seq] = jobs

    def remove(self, job: ClaimedJob) -> None:
        """The job's outcome is written, or the job is released."""
        # It may have been claimed again since, under a later epoch.
        if self.jobs.get(job.id) is job:
            del self.jobs[job.id]
            self._left[job.lane.seq] -= 1
        elif self.lingering.get(job.id) is job:
            del self.lingering[job.id]
            self.late[job.id] = job.lane.origin

    def end_lane(self, lane: Lane) -> None:
        """No job of a group's lane runs any more; its group may go on."""
        key = (lane.origin, lane.group or "")
        if self.lanes.get(key) is lane:
            del self.lanes[key]
            if lane.lingers:
                # The origin's next owner, maybe this process, has passed it over.
                if lane.more:
                    self.behind[key] = 0
            elif not lane.dropped and (lane.anew or lane.gives_way()):
                self.behind[key] = 0
            elif lane.after is not None and not lane.dropped:
                self.behind[key] = lane.after
            elif lane.more and not (lane.failed or lane.dropped):
                self.behind[key] = lane.last
        for job in lane.jobs:
            self.remove(job)

    def note_passed(self, origin: str, job_id: int) -> None:
        """Note that rows of an origin were passed over, from this id on."""
        for (lies, _), lane in self.lanes.items():
            if lies == origin:
                lane.note_passed(job_id)

    def release_job(self, job: ClaimedJob) -> None:
        """A claimed job will not run now: take it out of its claim."""
        self.remove(job)
        self.released.append(job)

    def find_old(self, seq: int) -> Old:
        """Find what is left of the claims up to a number."""
        old = [job for job in self.jobs.values() if job.lane.seq <= seq]
        begun = {job.lane for job in old if job.started and job.group is not None}
        waits = any(not job.started and job.lane not in begun for job in old)
        return Old(waits, [lane for lane in begun if lane.jobs])

    def shorten(self, lane: Lane) -> None:
        """Release the jobs that wait behind a lane's running job."""
        while True:
            try:
                job = lane.jobs.pop()
            except IndexError:
                return
            lane.more, lane.last = True, job.id - 1
            self.release_job(job)

    def release(self, origins: frozenset[str]) -> list[ClaimedJob]:
        """Forget the jobs in flight of these origins, and return them.

        A group with a running job keeps its lane: if this process gets the origin back,
        the group waits until that job has ended.
        """
        gone = [job for job in self.jobs.values() if job.lane.origin in origins]
        for job in gone:
            self.remove(job)
            if job.started and job.group is None:
                self.lingering[job.id] = job
            elif job.started:
                job.lane.lingers, job.lane.more = True, False
        self.lanes = {
            k: v for k, v in self.lanes.items() if v.lingers or k[0] not in origins
        }
        self.behind = {k: v for k, v in self.behind.items() if k[0] not in origins}
        return gone

    def doubt(self) -> None:
        """Commits may be lost: rows that were finished may be there again."""
        self.behind = dict.fromkeys(self.behind, 0)
        self.late.clear()
        for lane in self.lanes.values():
            lane.anew = True

    def fence(self, ids: Iterable[int]) -> None:
        """Settle nothing more of these jobs: their rows belong to others now."""
        for job_id in ids:
            if job := self.jobs.get(job_id):
                job.overtaken = True

    def ended_claims(self) -> list[int]:
        """The claims without jobs in flight, each returned once."""
        ended = [seq for seq, left in self._left.items() if left == 0]
        for seq in ended:
            del self._left[seq]
        return ended

    @property
    def claims(self) -> list[int]:
        """The claims with jobs in flight."""
        return list(self._left)
