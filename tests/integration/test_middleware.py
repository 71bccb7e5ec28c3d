"""Middleware runs around enqueue and run, and its context travels with the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from opentelemetry import trace

from tests.support.apps import HOME, executing, make_app
from tests.support.tracing import TRACE, TRACEPARENT

if TYPE_CHECKING:
    from jobs_lib import Draft, Job


@pytest.mark.guarantee("J22")
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_middleware_wraps_enqueue_and_run_in_order_and_the_trace_arrives(
    database_url, connect, wait_for, kind
):
    app = make_app(database_url)
    order: list[str] = []
    arrived: list[dict[str, str] | None] = []

    for name in ("outer", "inner"):

        @app.enqueue_middleware
        def enqueue(draft: Draft, call_next, name=name):
            order.append(f"{name} enqueue")
            draft.headers[name] = "was here"
            result = call_next(draft)
            order.append(f"{name} enqueued")
            return result

        @app.run_middleware
        def run(job: Job, call_next, name=name):
            order.append(f"{name} run")
            call_next()
            order.append(f"{name} ran")

        @app.run_middleware
        async def run_async(job: Job, call_next, name=name):
            order.append(f"{name} run")
            await call_next()
            order.append(f"{name} ran")

    @app.job(name="plain")
    def plain(job: Job) -> None:
        order.append("handler")
        arrived.append(job.headers)

    @app.job(name="async")
    async def waiting(job: Job) -> None:
        order.append("handler")
        arrived.append(job.headers)

    with (
        connect() as connection,
        trace.use_span(trace.NonRecordingSpan(TRACE)),
    ):
        given = app.jobs[kind].options(headers={"tenant": "acme"})
        given.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: order[-1] == "outer ran", what="all have been around it")
    assert order == [
        "outer enqueue", "inner enqueue", "inner enqueued", "outer enqueued",
        "outer run", "inner run", "handler", "inner ran", "outer ran",
    ]  # fmt: skip
    assert arrived == [
        {
            "traceparent": TRACEPARENT,
            "tenant": "acme",
            "outer": "was here",
            "inner": "was here",
        }
    ]
