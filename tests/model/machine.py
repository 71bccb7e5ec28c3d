"""Steps that may happen in any order; each is compared with the model."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jobs_lib import Cancel, Discard, Snooze
from jobs_lib.errors import FencedError
from jobs_lib.executor.lane import ClaimedJob, Result
from jobs_lib.jobs.job import RetryAfter
from jobs_lib.operating import cancel
from tests.model.draining import drain
from tests.model.world import ORIGINS, BookedPod, Ended, Known, World

if TYPE_CHECKING:
    from tests.model.bench import Bench

GROUPS = {"a": "local/0", "b": "local/0", "c": "local/1"}
HOUR = timedelta(hours=1)
PODS = st.integers(0, 2)
ANY = st.integers(0, 1_000)
ERRORS: dict[str, BaseException | None] = {
    "ok": None,
    "retry": RetryAfter(0),
    "retry later": RetryAfter(3600),
    "snooze": Snooze(0),
    "snooze long": Snooze(3600),
    "discard": Discard("no"),
    "cancel": Cancel("no"),
}


class Jobs(RuleBasedStateMachine):
    """Three pods, three origins, three groups."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench
        self.world = World()
        self.drafts: dict[int, list[Known]] = {}
        """The jobs of open transactions, by enqueuer."""
        self.late: list[tuple[BookedPod, ClaimedJob]] = []
        """The attempts whose time is over, and whose transactions are still open."""
        bench.clear()

    @initialize()
    def begin(self) -> None:
        self.world.pods = [self.make_pod(n) for n in range(3)]
        self.world.pods[0].take_over("local/0", "local/1")
        self.world.pods[1].take_over("local/2")

    def make_pod(self, at: int) -> BookedPod:
        return BookedPod(
            self.world,
            self.bench.database,
            self.bench.pods[at],
            self.bench.types,
            limit=6,
            lend=self.bench.handlers.connection,
        )

    # Enqueue

    @rule(
        group=st.sampled_from([None, *GROUPS]),
        type_=st.sampled_from(["work", "work", "other"]),
        priority=st.sampled_from(["normal", "normal", "normal", "high", "batch"]),
        when=st.sampled_from([None, None, None, -HOUR, HOUR]),
        ordered=st.sampled_from([True, True, False]),
        through=st.sampled_from([0, 0, 0, 1, 2]),
        count=st.integers(1, 3),
        place=ANY,
    )
    def enqueue(
        self, group, type_, priority, when, ordered, through, count, place
    ) -> None:
        others = [j for k, d in self.drafts.items() if k != through for j in d]
        if any(j.group == group and j.ordered for j in others):
            ordered = False  # an ordered one would wait for that transaction
        origin = GROUPS[group] if group else ORIGINS[place % 3]
        connection = self.bench.enqueuers[through]
        if through not in self.drafts:
            connection.execute("begin")
            self.drafts[through] = []
        for _ in range(count):
            options = self.bench.types[type_].options(
                origin=origin,
                priority=priority,
                ordered=ordered,
                run_at=None if when is None else datetime.now(UTC) + when,
            )
            job_id = options.enqueue(connection, group=group)
            self.drafts[through].append(
                Known(job_id, type_, origin, group, ordered, when != HOUR)
            )
        if not through:
            self.end_transaction(0, commit=True)

    @precondition(lambda self: self.drafts)
    @rule(place=ANY, commit=st.sampled_from([True, True, True, False]))
    def commit_or_roll_back(self, place, commit) -> None:
        self.end_transaction(sorted(self.drafts)[place % len(self.drafts)], commit)

    def end_transaction(self, through: int, commit: bool) -> None:
        self.bench.enqueuers[through].execute("commit" if commit else "rollback")
        drafts = self.drafts.pop(through)
        if commit:
            self.world.jobs |= {known.id: known for known in drafts}

    @precondition(lambda self: self.scheduled)
    @rule(place=ANY)
    def time_passes(self, place) -> None:
        known = self.scheduled[place % len(self.scheduled)]
        known.due = True
        self.bench.admin.execute(
            "update jobs_lib.jobs set run_at = clock_timestamp()"
            " where origin = %s and id = %s",
            (known.origin, known.id),
        )

    @property
    def scheduled(self) -> list[Known]:
        return [k for k in self.world.jobs.values() if k.end is None and not k.due]

    # Run

    @rule(
        pod=PODS,
        between=st.sampled_from(["before", "after", None, None]),
        place=ANY,
        starts=st.integers(0, 4),
    )
    def round_and_start(self, pod, between, place, starts) -> None:
        something = {between: lambda: self.happen(place)} if between else {}
        one = self.world.pods[pod]
        one.round(**something)
        for n in range(starts):
            if one.startable:
                self.start_one(one, place * n % len(one.startable))

    def happen(self, place: int) -> None:
        """Let others act while a round is under way."""
        opened = self.opened
        if opened and place % 2:
            self.commit_own(*opened[place % len(opened)])
        elif self.drafts:
            self.commit_or_roll_back_now(place)

    def commit_or_roll_back_now(self, place: int) -> None:
        through = sorted(self.drafts)[place % len(self.drafts)]
        self.end_transaction(through, commit=True)

    def start_one(self, pod: BookedPod, at: int) -> ClaimedJob | None:
        item: Any = pod.startable[at]
        if not isinstance(item, ClaimedJob):
            item = item.jobs[0] if item.jobs else None
        head: ClaimedJob | None = item
        job = pod.start(at)
        if job is not None:
            self.world.check_start(pod, job)
        elif head is not None and head.started:
            assert head.cancel_requested
            self.world.ended[pod].append(Ended(head, Result.CANCELLED))
        return job

    @property
    def idle(self) -> list[tuple[BookedPod, ClaimedJob]]:
        """The running handlers without a transaction."""
        return [
            (p, j) for p in self.world.pods for j in p.running if j.id not in p.open
        ]

    @property
    def opened(self) -> list[tuple[BookedPod, ClaimedJob]]:
        return [(p, j) for p in self.world.pods for j in p.running if j.id in p.open]

    @precondition(lambda self: self.idle)
    @rule(
        place=ANY,
        hows=st.lists(
            st.sampled_from(["ok", "ok", "own", "own", *ERRORS]),
            min_size=1,
            max_size=3,
        ),
    )
    def finish(self, place, hows) -> None:
        for how in hows:
            if self.idle:
                self.finish_one(place, how)

    def finish_one(self, place, how) -> None:
        pod, job = self.idle[place % len(self.idle)]
        if how == "own":
            pod.begin(job).execute("insert into effects values (%s)", (job.id,))
            return
        outcome = pod.finish(job, ERRORS[how])
        pod.note_end(job, outcome, due=how not in ("retry later", "snooze long"))

    @precondition(lambda self: self.opened)
    @rule(place=ANY)
    def commit(self, place) -> None:
        self.commit_own(*self.opened[place % len(self.opened)])

    def commit_own(self, pod: BookedPod, job: ClaimedJob) -> None:
        may, done = self.world.may_commit(pod, job), list(job.lane.done)
        outcome = pod.commit(job)
        assert outcome is not None
        assert (outcome.result is Result.COMMITTED) == may, (outcome, may)
        if may:
            self.world.note_commit(job, done)
        pod.note_end(job, outcome, due=True)

    @precondition(lambda self: self.opened)
    @rule(place=ANY)
    def time_out(self, place) -> None:
        pod, job = self.opened[place % len(self.opened)]
        pod.time_out(job)
        self.world.ended[pod].append(Ended(job, Result.RETRIED))
        self.late.append((pod, job))

    @precondition(lambda self: self.late)
    @rule(place=ANY)
    def commit_late(self, place) -> None:
        pod, job = self.late.pop(place % len(self.late))
        may, done = self.world.may_commit(pod, job), list(job.lane.done)
        transaction = pod.open_late.pop(job)
        if may:
            transaction.__exit__(None, None, None)
            self.world.note_commit(job, done)
            return
        with pytest.raises(FencedError):
            transaction.__exit__(None, None, None)

    @rule(
        what=st.sampled_from(
            ["crash", "take over", "take over", "hand over", "hurry", "take back"]
        ),
        pod=PODS,
        origin=st.sampled_from(ORIGINS),
    )
    def trouble(self, what, pod, origin) -> None:
        if what == "crash":
            self.crash(pod)
        elif what == "take over":
            # The owner before may be dead, or may live on and not know it yet.
            self.take(self.world.pods[pod], origin)
        elif what == "take back":
            self.world.pods[pod].dispatcher._take_back()
        else:
            self.hand_over(pod, origin, hurried=what == "hurry")

    # Own

    def crash(self, pod) -> None:
        dead = self.world.pods[pod]
        self.late = [(p, j) for p, j in self.late if p is not dead]
        dead.close()
        self.world.pods[pod] = self.make_pod(pod)

    def take(self, pod: BookedPod, origin: str) -> None:
        owner = self.world.owners.get(origin)
        if owner and owner[0] is pod:
            return
        if origin in pod.claimer.cursors:
            pod.leave(origin, hurried=True)  # it notices which origins it has lost
        pod.take_over(origin)

    def hand_over(self, pod, origin, hurried) -> None:
        owner = self.world.owners.get(origin)
        heir = self.world.pods[pod]
        if owner is None or owner[0] is heir or owner[0] not in self.world.pods:
            return
        giver: Any = owner[0]
        if hurried:
            del self.world.owners[origin]
            giver.leave(origin, hurried=True)
        else:
            for job in [j for j in giver.running if j.origin == origin]:
                if job.id in giver.open:
                    self.commit_own(giver, job)
                else:
                    giver.note_end(job, giver.finish(job), due=True)
            giver.leave(origin)
            del self.world.owners[origin]
        self.take(heir, origin)

    # Operate

    @rule(
        name=st.sampled_from(
            [("type", "other"), ("origin", "local/0"), ("origin", "local/2"),
             ("group", "a"), ("group", "c")]
        )
    )  # fmt: skip
    def pause_or_resume(self, name) -> None:
        if name in self.world.pauses:
            self.world.pauses.remove(name)
            query = "delete from jobs_lib.pauses where kind = %s and name = %s"
        else:
            self.world.pauses.add(name)
            query = "insert into jobs_lib.pauses values (%s, %s)"
        self.bench.admin.execute(query, name)

    @precondition(lambda self: self.world.jobs)
    @rule(place=ANY)
    def cancel(self, place) -> None:
        known = list(self.world.jobs.values())[-1 - place % len(self.world.jobs)]
        owner = self.world.owners.get(known.origin)
        claimed = owner is not None and (
            known.id in owner[0].claimer.in_flight.jobs
            or known.id in [job.id for job in owner[0].claimer.in_flight.released]
        )
        expected = "requested" if claimed else "cancelled"
        if known.end is not None:
            expected = "missing"
        became = cancel(self.bench.database, [known.id], stale_after=3600)
        assert became == {known.id: expected}, known
        if expected == "cancelled":
            known.end = "cancelled"

    # What must hold

    @invariant()
    def the_table_is_as_the_model_says(self) -> None:
        self.world.compare(
            self.bench.admin.execute(
                "select id, attempt, crashes, state from jobs_lib.jobs"
            ).fetchall()
        )

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                drain(self)
        finally:
            for pod in self.world.pods:
                pod.close()
            for through in list(self.drafts):
                self.end_transaction(through, commit=False)
