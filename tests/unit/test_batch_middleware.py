"""Middleware around runs is called around batch handlers, too: once for each job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from jobs_lib import App, Discard, Item, Snooze
from jobs_lib.executor.lane import ClaimedJob, Finished, Lane, Result
from jobs_lib.executor.running.runner import Runner

if TYPE_CHECKING:
    from jobs_lib import Job

HERE = UUID(int=1)


@pytest.fixture
def calls() -> list[list[str]]:
    """The payloads of each call of the batch handler."""
    return []


@pytest.fixture
def app(calls):
    """An app with a batch handler that fails at a broken payload."""
    app = App("test")

    @app.batch(size=1_000)
    def index(items: list[Item[str]]) -> None:
        calls.append([item.payload for item in items])
        if any(item.payload == "broken" for item in items):
            raise ValueError("broken")

    return app


def run(app: App, *payloads: str) -> list[Result | None]:
    """Run these jobs in one call; returns their results, None for completed."""
    connections: Any = SimpleNamespace(forks=0, lend=None)
    runner = Runner(app.jobs, connections, app.middleware)
    outcomes = runner.run_batch([job(n, text) for n, text in enumerate(payloads)])
    return [None if outcome is None else outcome.result for outcome in outcomes]


def job(number: int, payload: str) -> ClaimedJob:
    lane = Lane("local/0", 1, None, 1, HERE, Finished())
    text = f'{{"payload": "{payload}"}}'
    return ClaimedJob(
        number, "index", None, 1, 0, 0, text, None, 0.0, None, "local/0", HERE, lane
    )


def test_middleware_is_called_for_each_job_around_one_call(app, calls):
    order: list[Any] = []

    for name in ("outer", "inner"):

        @app.run_middleware
        def around(job: Job, call_next, name=name):
            order.append((name, job.id))
            call_next()
            order.append((name, job.id, len(calls)))

    assert run(app, "a", "b") == [None, None]
    assert calls == [["a", "b"]]
    begun = [("outer", 0), ("inner", 0), ("outer", 1), ("inner", 1)]
    assert order == begun + [(*one, 1) for one in reversed(begun)]


@pytest.mark.parametrize(
    ("error", "result"), [(Discard(), Result.DISCARDED), (Snooze(9), Result.SNOOZED)]
)
def test_an_error_of_middleware_is_that_of_its_job_alone(app, calls, error, result):
    @app.run_middleware
    def refuse(job: Job, call_next):
        if job.id == 1:
            raise error
        call_next()

    assert run(app, "a", "b", "c") == [None, result, None]
    assert calls == [["a"], ["c"]]


def test_middleware_that_runs_one_job_not_at_all_keeps_no_other_from_running(
    app, calls
):
    @app.run_middleware
    def skip(job: Job, call_next):
        if job.id != 1:
            call_next()

    assert run(app, "a", "b", "c") == [None, None, None]
    assert calls == [["a"], ["c"]]


def test_middleware_that_keeps_an_error_to_itself_ends_only_the_failed_job(app, calls):
    @app.run_middleware
    def forgive(job: Job, call_next):
        try:
            call_next()
        except ValueError:
            if job.id != 1:
                raise

    assert run(app, "a", "broken", "c") == [None, None, None]
    assert calls == [["a", "broken", "c"], ["a"], ["broken"], ["c"]]


def test_many_jobs_are_called_in_parts_that_python_can_nest(app, calls):
    seen: list[int] = []

    for _ in range(3):

        @app.run_middleware
        def around(job: Job, call_next):
            seen.append(job.id)
            call_next()

    runner = Runner(app.jobs, SimpleNamespace(forks=0, lend=None), app.middleware)  # type: ignore[arg-type]
    size = runner.batch_size(job(0, "a"))
    assert run(app, *["a"] * size) == [None] * size
    assert len(calls) == 1
    assert sorted(set(seen)) == list(range(size))
    assert size > 10
