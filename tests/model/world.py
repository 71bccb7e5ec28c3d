"""The model of the jobs' true states, in plain Python."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib.executor.lane import Result
from tests.support.stepping import Pod, nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs_lib.executor.lane import ClaimedJob, Outcome

ORIGINS = ["local/0", "local/1", "local/2"]
ENDS = {
    Result.COMPLETED: "completed",
    Result.DISCARDED: "discarded",
    Result.CANCELLED: "cancelled",
}


@dataclass(eq=False)
class Known:
    """A job, as the model knows it once its enqueue is committed."""

    id: int
    type: str
    origin: str
    group: str | None
    ordered: bool
    due: bool
    attempt: int = 0
    crashes: int = 0
    end: str | None = None


@dataclass(eq=False)
class Ended:
    """An attempt that has ended and is not written yet."""

    job: ClaimedJob
    result: Result
    due: bool = True
    ran: bool = True


class World:
    """The jobs, the owners of their origins, and unwritten ends."""

    def __init__(self) -> None:
        self.jobs: dict[int, Known] = {}
        self.owners: dict[str, tuple[Pod, int]] = {}
        self.ended: defaultdict[Pod, list[Ended]] = defaultdict(list)
        self.pauses: set[tuple[str, str]] = set()
        self.pods: list[BookedPod] = []
        self.effects: set[int] = set()
        """The jobs whose own transaction is committed."""

    def is_live(self, pod: Pod, job: ClaimedJob) -> bool:
        """Whether the pod's actions on the job still count."""
        return self.owners.get(job.origin) == (pod, job.lane.epoch)

    def is_paused(self, job: Known | ClaimedJob) -> bool:
        names = {("type", job.type), ("origin", job.origin), ("group", job.group)}
        return bool(names & self.pauses)

    # What a take-over, a round and a handler change

    def note_taken(self, pod: Pod, origins: Mapping[str, int]) -> None:
        """Note a take-over: each job that the last owner had claimed counts a crash."""
        for origin, epoch in origins.items():
            if before := self.owners.get(origin):
                claimer = before[0].claimer
                cut = {*claimer.in_flight.jobs.values(), *claimer.in_flight.released}
                for job in cut:
                    known = self.jobs[job.id]
                    if job.origin == origin and known.end is None:
                        known.crashes += 1
            self.owners[origin] = (pod, epoch)

    def write(self, pod: Pod, ended: list[Ended]) -> None:
        """Note what a round has written."""
        for one in ended:
            known = self.jobs[one.job.id]
            if known.end is not None or not self.is_live(pod, one.job):
                continue
            if one.result in ENDS:
                known.end = ENDS[one.result]
            elif one.result is not Result.FENCED:
                known.due = one.due
                if one.result is Result.RETRIED:
                    known.attempt += known.crashes + one.ran
                    known.crashes = 0

    def may_commit(self, pod: Pod, job: ClaimedJob) -> bool:
        """Whether the job's own transaction may commit."""
        known = self.jobs[job.id]
        attempt = known.attempt + known.crashes + 1
        return self.is_live(pod, job) and known.end is None and job.attempt == attempt

    def note_commit(self, job: ClaimedJob, done: list[ClaimedJob]) -> None:
        """Note the commit of the job's transaction, and of earlier jobs in its lane."""
        self.effects.add(job.id)
        for one in (*done, job):
            self.jobs[one.id].end = self.jobs[one.id].end or "completed"
        early = [k.id for k in self.before(job) if k.end is None]
        assert not early, f"{job} took effect before {early} ended"

    def before(self, job: ClaimedJob) -> list[Known]:
        """The jobs of its group that were enqueued before it."""
        mine = self.jobs[job.id]
        if not mine.ordered or job.group is None:
            return []
        return [
            known
            for known in self.jobs.values()
            if known.group == job.group and known.ordered and known.id < job.id
        ]

    # What must hold

    def check_start(self, pod: Pod, job: ClaimedJob) -> None:
        """Check that a handler may be called."""
        assert job.id in self.jobs, f"{job} was never committed"
        for other in pod.running:
            # Live or not: a process does not run a job again that it still runs.
            assert other is job or other.id != job.id, f"{job} runs beside itself"
            same = other is not job and job.group is not None
            assert not (same and (other.origin, other.group) == (job.origin, job.group))
        if not self.is_live(pod, job):
            return
        known = self.jobs[job.id]
        over = {
            one.job.id
            for one in self.ended[pod]
            if one.result in ENDS and self.is_live(pod, one.job)
        }
        assert known.end is None, f"{job} ran after it was {known.end}"
        assert job.id not in over, f"{job} ran again"
        assert known.due, f"{job} ran early"
        expected = (known.attempt + known.crashes + 1, known.crashes)
        assert (job.attempt, job.crashes) == expected, f"{job}, not {expected}"
        waiting = [k.id for k in self.before(job) if k.end is None and k.id not in over]
        assert not waiting, f"{job} ran before {waiting}"
        beside = [
            other
            for one in self.pods
            for other in one.running
            if other is not job and self.is_live(one, other)
        ]
        for other in beside:
            assert other.id != job.id, f"{job} runs twice"
            assert job.group is None or other.group != job.group, f"{job} and {other}"
            suspects = job.crashes >= 2 and other.crashes >= 2
            same = other.lane.finished is job.lane.finished
            assert not (same and suspects), f"{job} beside {other}, both suspects"

    def compare(self, rows: list[tuple[Any, ...]]) -> None:
        """Check that the table holds exactly the unfinished jobs."""
        found = {row[0]: row[1:] for row in rows}
        unfinished = {k.id: k for k in self.jobs.values() if k.end is None}
        assert found.keys() == unfinished.keys(), (
            f"not in the table: {[k for i, k in unfinished.items() if i not in found]},"
            f" still there: {[self.jobs[i] for i in found if i not in unfinished]}"
        )
        for job_id, (attempt, crashes, state) in found.items():
            known = unfinished[job_id]
            assert (attempt, crashes) == (known.attempt, known.crashes), (
                f"attempt={attempt}, crashes={crashes} in the table, not as in {known}"
            )
            assert known.due or state == "scheduled", known


class BookedPod(Pod):
    """A pod that tells the world about its actions."""

    def __init__(self, world: World, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.world = world

    def take(self, origins: Mapping[str, int]) -> None:
        """Take origins, and tell the world."""
        self.world.note_taken(self, origins)
        super().take(origins)

    def round(
        self,
        before: Callable[[], object] = nothing,
        after: Callable[[], object] = nothing,
    ) -> None:
        """Make a round: it writes earlier ends, and claims nothing that is paused."""
        ended = self.world.ended.pop(self, [])
        flying = set(self.claimer.in_flight.jobs)
        groups = {name for kind, name in self.world.pauses if kind == "group"}
        known = {**self.claimer.scope.paused, "group": groups}

        def written() -> None:
            self.world.write(self, ended)
            after()

        super().round(before, written)
        for outcome in self.dispatcher._settler.early:
            assert outcome.job.crashes >= 3
            self.world.ended[self].append(Ended(outcome.job, outcome.result, ran=False))
        for job in self.claimer.in_flight.jobs.values():
            names = {"type": job.type, "origin": job.origin, "group": job.group}
            if job.id not in flying and self.world.is_paused(job):
                told = any(names[kind] in known.get(kind, ()) for kind in names)
                assert not told, f"{job} was claimed, though paused"

    def note_end(self, job: ClaimedJob, outcome: Outcome | None, *, due: bool) -> None:
        """Note that a handler has ended."""
        result = Result.COMPLETED if outcome is None else outcome.result
        if result is not Result.COMMITTED:
            self.world.ended[self].append(Ended(job, result, due))
