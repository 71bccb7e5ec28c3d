"""Two dispatchers take back, at the same moment, jobs that no worker has begun."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from jobs_lib import Item, Job  # noqa: TC001 - handlers' annotations are read
from jobs_lib.executor.claiming.claimer import Claimer
from jobs_lib.executor.lane import ClaimedJob, Finished, Lane
from jobs_lib.executor.running.batch_runner import BatchRunner
from jobs_lib.executor.running.runner import Runner
from jobs_lib.executor.running.workers import WorkerPool
from tests.support.apps import make_app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.executor.limiting.turn import Turn

HERE = UUID(int=1)
ORIGIN = "local/0"


@pytest.fixture
def app():
    """An app with a plain type, an async one, and one with a batch handler."""
    app = make_app("postgresql://nowhere")

    @app.job()
    def work(job: Job) -> None: ...

    @app.job()
    async def wait(job: Job) -> None: ...

    @app.batch(size=10)
    def index(items: list[Item[str]]) -> None: ...

    return app


@pytest.fixture
def workers(app) -> Iterator[WorkerPool]:
    """Workers that were not started: what is put there stays."""
    pool = WorkerPool(
        app.database(), app.jobs, HERE, app.settings, (), starving=lambda: None
    )
    yield pool
    pool._pool.close()


def make_lane(finished: Finished, group: str, *ids: int, type_: str = "work") -> Lane:
    lane = Lane(ORIGIN, 1, group, 1, HERE, finished)
    for number in ids:
        job = ClaimedJob(
            number, type_, group, 1, 0, 0, '{"payload": "a"}', None, 0.0, None, ORIGIN,
            HERE, lane,
        )  # fmt: skip
        lane.jobs.append(job)
    return lane


def test_lanes_that_another_dispatcher_empties_meanwhile_cost_no_job(
    workers, monkeypatch
):
    ours, theirs = Finished(), Finished()
    lanes = [make_lane(theirs, "b", 3, 4), make_lane(ours, "a", 1, 2)]
    workers.put(lanes)
    take_back = workers._workers.take_back

    def shorten_meanwhile() -> list[Any]:
        # The other dispatcher shortens all lanes that it has in flight.
        taken = take_back()
        lanes[0].jobs.clear()
        return taken

    monkeypatch.setattr(workers._workers, "take_back", shorten_meanwhile)
    assert workers.take_back(ours) == lanes[1:]
    assert [job.id for job in lanes[1].jobs] == [1, 2]
    # The other one's lane is there again: a worker ends it.
    monkeypatch.undo()
    assert workers.take_back(theirs) == lanes[:1]


def test_an_empty_lane_that_is_taken_back_ends_where_its_group_goes_on(app):
    claimer = Claimer(HERE, HERE, app.jobs)
    lane = make_lane(claimer.finished, "a", 5, 6)
    claimer.in_flight.add_claim(1, 2)
    claimer.in_flight.jobs = {job.id: job for job in lane.jobs}
    claimer.in_flight.lanes = {(ORIGIN, "a"): lane}
    claimer.in_flight.shorten(lane)
    claimer.take_back(lane)
    assert claimer.in_flight.lanes == {}
    assert claimer.in_flight.behind == {(ORIGIN, "a"): 4}


def test_a_batch_takes_the_jobs_behind_a_lane_that_was_emptied(app):
    runner = Runner(app.jobs, _NoConnections())  # type: ignore[arg-type]
    finished = Finished()
    gone = make_lane(finished, "a", type_="index")
    ready: deque[Item[Any] | Turn] = deque(
        [gone, make_lane(finished, "b", 2, type_="index")]  # type: ignore[list-item]
    )
    batches = BatchRunner(runner, ready)  # type: ignore[arg-type]
    assert batches.run(gone) is None
    assert batches.run(make_lane(finished, "c", 1, type_="index")) == 2
    completed, _, lanes = finished.take()
    assert [job.id for job in completed] == [1, 2]
    assert gone in lanes


class _NoConnections:
    forks = 0
    lend = None
