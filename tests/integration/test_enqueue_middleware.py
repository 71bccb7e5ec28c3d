"""Middleware runs around enqueue, and its context travels with the job."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from opentelemetry import trace

from jobs_lib import Draft, Job, PayloadError
from tests.support.apps import make_app
from tests.support.tracing import TRACE, TRACEPARENT


@pytest.fixture
def app(database_url):
    """An app with one job type."""
    app = make_app(database_url)

    @app.job()
    def work(job: Job, n: int) -> None: ...

    return app


def stored(connect, columns: str):
    with connect() as connection:
        query = f"select {columns} from jobs_lib.jobs order by id"
        return connection.execute(query).fetchall()


def test_hooks_wrap_every_enqueue_the_first_one_outermost(app, connect, database_url):
    work = app.jobs["work"]
    seen: list[object] = []

    @app.enqueue_middleware
    def outer(draft, call_next):
        seen.append(("outer", draft.type, len(draft.payloads)))
        draft.headers["tenant"] = "a"
        result = call_next(draft)
        seen.append("outer again")
        return result

    @app.enqueue_middleware
    def inner(draft: Draft, call_next):
        seen.append(("inner", dict(draft.headers)))
        draft.headers["tenant"] += "b"
        draft.priority = "high"
        for payload in draft.payloads:
            payload["n"] += 100
        return call_next(draft)

    with connect() as connection:
        given = work.options(headers={"own": "x"})
        assert isinstance(given.enqueue(connection, n=1), int)
        assert work.enqueue_many(connection, [{"n": 2}, {"n": 3}]) == 2

    async def later():
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            assert isinstance(await work.enqueue(connection, n=4), int)

    asyncio.run(later())
    assert seen[:3] == [
        ("outer", "work", 1),
        ("inner", {"own": "x", "tenant": "a"}),
        "outer again",
    ]
    assert seen[3] == ("outer", "work", 2)
    assert stored(connect, "payload, headers, priority") == [
        ({"n": 101}, {"own": "x", "tenant": "ab"}, 1),
        *(({"n": n}, {"tenant": "ab"}, 1) for n in (102, 103, 104)),
    ]


def test_headers_that_a_hook_sets_are_checked(app, connect):
    work = app.jobs["work"]

    @app.enqueue_middleware
    def spoil(draft, call_next):
        draft.headers["a"] = "\0"
        return call_next(draft)

    with (
        connect() as connection,
        pytest.raises(PayloadError, match="headers of 'work'"),
    ):
        work.enqueue(connection, n=1)
    assert stored(connect, "id") == []


def test_the_active_span_travels_with_the_job(app, connect):
    work = app.jobs["work"]
    with connect() as connection:
        work.enqueue(connection, n=1)
        with trace.use_span(trace.NonRecordingSpan(TRACE)):
            work.enqueue(connection, n=2)
            work.options(headers={"tenant": "a"}).enqueue_many(connection, [{"n": 3}])
            work.options(headers={"traceparent": "mine"}).enqueue(connection, n=4)
    assert stored(connect, "headers") == [
        (None,),
        ({"traceparent": TRACEPARENT},),
        ({"traceparent": TRACEPARENT, "tenant": "a"},),
        ({"traceparent": "mine"},),
    ]


def test_enqueue_works_without_opentelemetry_and_imports_no_async_sqlalchemy(
    database_url, run_process, connect
):
    script = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
import psycopg
from jobs_lib import App, Job
from jobs_lib.settings import load_settings
app = App("test", settings=load_settings(database_url=sys.argv[1]))
@app.job()
def work(job: Job): ...
with psycopg.connect(sys.argv[1]) as connection:
    work.enqueue(connection)
print("sqlalchemy.ext.asyncio" in sys.modules, flush=True)
"""
    worker = run_process("-c", script, database_url)
    worker.wait_for_line("False")
    assert stored(connect, "headers") == [(None,)]
