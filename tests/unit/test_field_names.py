"""A payload's fields may have the names that the library's own parameters have."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from jobs_lib import Job, Rate
from jobs_lib.errors import EnqueueError
from jobs_lib.executor.lane import Finished, Lane
from jobs_lib.executor.limiting.gate import JobGate
from jobs_lib.executor.running.runner import Runner
from jobs_lib.executor.running.throttle import Throttle
from tests.support.apps import make_app
from tests.support.claimed import make_claimed

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib import App

FIELDS = {"job": "a", "conn": "b", "self": "c"}


class OpenGate(JobGate):
    """A gate that is never closed."""

    def __init__(self) -> None: ...

    def _ensure_open(self, job: Job) -> None: ...


def run(app: App, *, is_async: bool) -> None:
    connections: Any = SimpleNamespace(forks=0, lend=None)
    throttle = Throttle(app.jobs, connections)
    throttle._admit = lambda *_: None  # type: ignore[method-assign]
    gates = {"work": OpenGate()}
    runner = Runner(app.jobs, connections, app.middleware, throttle, gates)
    lane = Lane("local/0", 1, None, 1, UUID(int=1), Finished())
    job = make_claimed(lane, 1, '{"job": "a", "conn": "b", "self": "c"}')
    assert (asyncio.run(runner.run_async(job)) if is_async else runner.run(job)) is None


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_handler_gets_fields_of_any_name_through_middleware_rate_and_gate(kind):
    app = make_app("")
    found: list[tuple[str, str, str]] = []

    if kind == "plain":

        @app.run_middleware
        def around(job: Job, call_next: Callable[[], Any]) -> None:
            call_next()

        @app.job(name="work", rate=Rate(1))
        def work(this: Job, job: str, conn: str, self: str) -> None:
            found.append((job, conn, self))

    else:

        @app.run_middleware
        async def around_async(job: Job, call_next: Callable[[], Any]) -> None:
            await call_next()

        @app.job(name="work", rate=Rate(1))
        async def work(this: Job, job: str, conn: str, self: str) -> None:
            found.append((job, conn, self))

    run(app, is_async=kind == "async")
    assert found == [("a", "b", "c")]


def test_fields_of_any_name_are_given_by_name():
    app = make_app("")
    found: list[tuple[str, str, str]] = []

    @app.job()
    def work(this: Job, job: str, conn: str, self: str) -> None:
        found.append((job, conn, self))

    # The object is no connection, but all fields are taken.
    nothing: Any = object()
    with pytest.raises(EnqueueError, match="cannot write on a"):
        work.enqueue(nothing, **FIELDS)
    work(nothing, **FIELDS)
    assert found == [("a", "b", "c")]
