"""No handler begins after a wait that was longer than the lease."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest

from jobs_lib import Item, Rate
from jobs_lib.executor.lane import ClaimedJob, Finished, Lane, Outcome, Result
from jobs_lib.executor.running.batch_runner import BatchRunner
from jobs_lib.executor.running.runner import Runner
from jobs_lib.executor.running.throttle import Throttle
from jobs_lib.executor.running.transaction import JobConnections
from jobs_lib.ownership.lease import Lease
from jobs_lib.postgres.queries import load_queries
from tests.support.apps import make_app
from tests.support.claimed import make_claimed

QUERIES = load_queries("jobs_lib")


class Server:
    """Answers the queries before a handler; the lease may end during one."""

    def __init__(self) -> None:
        self.ends: list[Lease] = []
        self.answer_within: float | None = None

    @contextmanager
    def lend(self):
        """Lend a connection."""
        yield self

    def execute(self, query, parameters):
        """Answer late."""
        for lease in self.ends:
            lease.until = -math.inf
        self._row = (1, 0.0) if query == QUERIES["take_starts"] else ("{}",)
        if query == QUERIES["payload"] and parameters["id"] > 1:
            self._row = ('{"payload": 7}',)
        return self

    def fetchone(self):
        """Return the row that the query asks for."""
        return self._row


class Scene:
    """A runner, and the calls of its handlers."""

    def __init__(self) -> None:
        self.app = make_app("")
        self.server = Server()
        self.called: list[Any] = []

    def runner(self) -> Runner:
        """Make what runs the jobs."""
        types = self.app.jobs
        connections = JobConnections(types, QUERIES, UUID(int=1), self.server.lend)
        return Runner(types, connections, throttle=Throttle(types, connections))

    def run(self, *jobs: ClaimedJob) -> list[Outcome | None]:
        """Run jobs of one type and return their outcomes."""
        runner = self.runner()
        job_type = self.app.jobs[jobs[0].type]
        if job_type.batch > 1:
            return runner.run_batch(jobs)
        if job_type.is_async:
            return [asyncio.run(runner.run_async(job)) for job in jobs]
        return [runner.run(job) for job in jobs]

    def declare(self, kind: str, **options: Any) -> None:
        """Declare a type `work` with a handler that notes its calls."""
        if kind == "batch":

            @self.app.batch(name="work", size=9)
            def work(items: list[Item[int]]) -> None:
                self.called.append([item.job.id for item in items])

        elif kind == "async":

            @self.app.job(name="work", **options)
            async def work(job) -> None:
                self.called.append(job.id)

        else:

            @self.app.job(name="work", **options)
            def work(job) -> None:
                self.called.append(job.id)


@pytest.fixture
def scene():
    """A runner without a database."""
    return Scene()


def make_job(job_id: int, payload: str | None, group: str | None = None) -> ClaimedJob:
    lane = Lane("local/0", 1, group, job_id, UUID(int=1), Finished(), Lease())
    return make_claimed(lane, job_id, payload)


def results(outcomes: list[Outcome | None]) -> list[Result]:
    return [o.result if o else Result.COMPLETED for o in outcomes]


@pytest.mark.guarantee("I4")
@pytest.mark.parametrize("over", [False, True], ids=["lasts", "over"])
@pytest.mark.parametrize("waits_for", ["payload", "rate"])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_job_does_not_begin_when_its_lease_ends_while_it_waits(
    scene, kind, waits_for, over
):
    scene.declare(kind, rate=Rate(1) if waits_for == "rate" else None)
    job = make_job(1, None if waits_for == "payload" else "{}")
    scene.server.ends = [job.lane.lease] if over else []
    assert results(scene.run(job)) == [Result.DROPPED if over else Result.COMPLETED]
    assert scene.called == ([] if over else [1])


@pytest.mark.guarantee("I4")
@pytest.mark.parametrize("late", [2, 3, 4])
def test_a_job_is_dropped_when_its_lease_ends_while_its_batch_reads_a_payload(
    scene, late
):
    scene.declare("batch")
    small = '{"payload": 1}'
    jobs = [make_job(2, small), make_job(3, None), make_job(4, small)]
    lane = next(job.lane for job in jobs if job.id == late)
    scene.server.ends = [lane.lease]
    ends = dict(zip((2, 3, 4), results(scene.run(*jobs)), strict=True))
    assert ends.pop(late) is Result.DROPPED
    assert set(ends.values()) == {Result.COMPLETED}
    assert scene.called == [sorted(ends)]


@pytest.mark.guarantee("I4")
def test_a_job_of_a_failed_batch_is_not_tried_alone_once_its_lease_is_over(scene):
    jobs = [make_job(2, '{"payload": 1}'), make_job(3, '{"payload": 1}')]

    @scene.app.batch(name="work", size=9)
    def work(items: list[Item[int]]) -> None:
        scene.called.append([item.job.id for item in items])
        jobs[1].lane.lease.until = -math.inf
        if len(items) > 1:
            raise ValueError("one of them")

    assert results(scene.run(*jobs)) == [Result.COMPLETED, Result.DROPPED]
    assert scene.called == [[2, 3], [2]]


def test_a_job_behind_an_unreadable_payload_of_its_group_waits(scene):
    scene.declare("batch")
    lane = make_job(2, None, "g").lane
    jobs = [
        make_claimed(lane, n, payload)
        for n, payload in ((2, '{"other": 1}'), (3, '{"payload": 1}'))
    ]
    ends = scene.run(*jobs)
    assert results(ends) == [Result.SNOOZED] * 2
    assert scene.called == []


@pytest.mark.guarantee("J14")
@pytest.mark.parametrize("group", [None, "g"], ids=["alone", "group"])
def test_a_job_that_was_cancelled_while_it_waited_does_not_begin_in_a_batch(
    scene, group
):
    scene.declare("batch")
    lane = make_job(1, "{}", group).lane
    jobs = [make_claimed(lane, n, '{"payload": 1}') for n in (1, 2, 3)]
    jobs[1].cancel_requested = True
    if group:
        lane.jobs.extend(jobs)
    ready: deque[Any] = deque([lane] if group else jobs)
    batches = BatchRunner(scene.runner(), ready)
    while ready:
        batches.run(ready.popleft())
    completed, outcomes, ended = lane.finished.take()
    assert [(o.job.id, o.result) for o in outcomes] == [(2, Result.CANCELLED)]
    # Behind a cancelled job the group waits until that is written.
    ran = [1] if group else [1, 3]
    assert scene.called == [ran]
    assert [job.id for job in completed] == ran
    assert [(job.id, job.started) for job in lane.jobs] == [(3, False)] * bool(group)
    assert ended == [lane] * bool(group)
