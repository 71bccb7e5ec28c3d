"""A job ends at the moment at which its time is over, and its worker begins another."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock
from uuid import UUID

import pytest

from jobs_lib import Job  # noqa: TC001 - handlers' annotations are read
from jobs_lib.executor.lane import Finished, Lane
from jobs_lib.executor.running import threads, watchdog
from jobs_lib.executor.running.lane_runner import LaneRunner
from jobs_lib.executor.running.workers import WorkerPool
from tests.support.apps import make_app
from tests.support.claimed import make_claimed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.executor.lane import ClaimedJob


@pytest.fixture(params=[False, True], ids=["threads", "loop"])
def is_async(request) -> bool:
    """Whether the handler is async."""
    return request.param


@pytest.fixture
def workers(is_async) -> Iterator[WorkerPool]:
    """Workers that were not started, for a type with a time limit."""
    app = make_app("postgresql://nowhere")
    if is_async:

        @app.job(name="work", time_limit=9)
        async def wait(job: Job) -> None: ...
    else:

        @app.job(name="work", time_limit=9)
        def work(job: Job) -> None: ...

    pool = WorkerPool(
        app.database(), app.jobs, UUID(int=1), app.settings, (), starving=lambda: None
    )
    yield pool
    pool._pool.close()


@pytest.mark.guarantee("J9")
def test_a_job_that_ends_as_its_time_is_over_costs_the_next_one_nothing(
    workers, is_async, monkeypatch
):
    finished = Finished()
    lane = Lane("local/0", 1, None, 1, UUID(int=1), finished)
    first, second = make_claimed(lane, 1), make_claimed(lane, 2)
    side: Any = workers._loop if is_async else workers._workers
    side._queue.put([first, second], first=False)
    worker: Any = Mock(spec=asyncio.Task) if is_async else 7
    runner: LaneRunner[Any] = LaneRunner(side._queue, worker)
    assert runner.take() is first
    begun: list[ClaimedJob | None] = []

    def end_first(_: object) -> str:
        assert runner.end(first, None)
        begun.append(runner.take())
        return "its stack"

    # The watcher has seen the first job, and reads where it stands.
    monkeypatch.setattr(threads, "read_stack", end_first)
    monkeypatch.setattr(watchdog, "read_task", end_first)
    monkeypatch.setattr(side, "_add_thread", Mock(), raising=False)
    first.deadline, first.timed_out = -1_000.0, is_async
    (side._watchdog if is_async else side)._watch_limits()
    assert begun == [second]
    assert finished.take() == ([first], [], [])
    assert runner.end(second, None)
    assert finished.take() == ([second], [], [])
