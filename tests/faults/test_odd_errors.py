"""An error without a usable text costs one failure, and ends no thread."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import threading
import time

import pytest

from jobs_lib import Item, exponential
from jobs_lib.errors import JobsError
from jobs_lib.executor.running.runner import Runner
from jobs_lib.masking import describe, keep_secret
from jobs_lib.telemetry import emit, listen
from tests.faults.helpers import count
from tests.support.apps import HOME, executing, heard, make_app
from tests.support.odd import ODD, raise_odd

RETRY = exponential(first=0.01, cap=0.01, max_attempts=2)
WORKERS = 2


each = pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)


def declare(app, kind, act):
    """Declare a job type of a kind whose handler calls this with the job's number."""
    job = app.job(name="odd", retry=RETRY)
    if kind == "batch":

        @app.batch(name="odd", retry=RETRY, size=5)
        def odd_batch(items: list[Item[int]]) -> None:
            numbers = [item.payload for item in items]
            items.clear()
            for n in numbers:
                act(n)

        return odd_batch
    if kind == "async":

        @job
        async def odd_async(job, n: int) -> None:
            await asyncio.sleep(0)
            act(n)

        return odd_async
    if kind == "transaction":

        @job
        def odd_inside(job, n: int) -> None:
            with job.transaction() as connection:
                connection.execute("insert into effects values (1)")
                act(n)

        return odd_inside
    if kind == "middleware":

        @app.run_middleware
        def fail(job, call_next):
            if job.type == "odd":
                act(json.loads(job.payload)["n"])
            return call_next()

    @app.job(name="odd", retry=RETRY, group=lambda n: str(n % 3))
    def odd(job, n: int) -> None:
        act(n)

    return odd


def enqueue(connection, odd, kind: str, jobs: int) -> None:
    name = "payload" if kind == "batch" else "n"
    odd.enqueue_many(connection, [{name: n} for n in range(jobs)])


@pytest.mark.guarantee("FJ19")
@pytest.mark.parametrize(
    "kind", ["plain", "async", "batch", "transaction", "middleware"]
)
def test_an_odd_error_is_a_failure_and_costs_no_thread(
    url, app, connect, wait_for, kind
):
    odd = declare(app, kind, raise_odd)
    done = threading.Event()

    @app.job()
    def fine(job) -> None:
        done.set()

    before = set(threading.enumerate())
    with heard("loop.failed", "thread.ended") as failed:
        with executing(app, HOME, workers=WORKERS):
            with connect() as connection:
                enqueue(connection, odd, kind, len(ODD))
            wait_for(lambda: count(url) == 0, what="all are given up")
            with connect() as connection:
                fine.enqueue(connection)
            assert done.wait(30)
            assert living(before) == WORKERS
        assert failed == []
    with connect() as connection:
        rows = connection.execute("select errors from jobs_lib.discarded").fetchall()
    assert len(rows) == len(ODD)
    for (errors,) in rows:
        assert [error["attempt"] for error in errors] == [1, 2]
        assert all(len(error["error"]) <= 2_000 for error in errors)
    assert count(url, "effects") == 0


def living(before: set[threading.Thread]) -> int:
    """Count the worker threads that are new."""
    names = [thread.name for thread in set(threading.enumerate()) - before]
    return sum(name.startswith("jobs_lib worker") for name in names)


@pytest.mark.guarantee("FJ19")
@pytest.mark.parametrize("kind", ["plain", "batch"])
def test_a_thread_that_is_ended_from_outside_is_replaced_and_reported(
    url, app, connect, wait_for, monkeypatch, kind
):
    """Throw like libraries with time limits, even just after the handler."""
    real = Runner._finish

    def thrown_into(self, job, outcome):
        if job.type == "odd" and job.attempt == 1:
            thread = ctypes.c_ulong(threading.get_ident())
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                thread, ctypes.py_object(SystemExit)
            )
            while True:  # until the exception arrives
                time.sleep(0.001)
        return real(self, job, outcome)

    monkeypatch.setattr(Runner, "_finish", thrown_into)
    ran: list[int] = []
    odd = declare(app, kind, ran.append)
    before = set(threading.enumerate())
    with (
        heard("thread.ended") as ended,
        executing(app, HOME, workers=WORKERS),
    ):
        with connect() as connection:
            enqueue(connection, odd, kind, 3 * WORKERS)
        wait_for(lambda: count(url) == 0, what="all have run")
        wait_for(lambda: living(before) == WORKERS, what="as many threads as before")
    assert ended
    assert ended[0][1]["thread"].startswith("jobs_lib worker")
    assert ended[0][1]["error"].startswith("SystemExit")
    # A batch fails as a whole: its second attempt may be the first one of another job.
    assert kind == "batch" or count(url, "jobs_lib.discarded") == 0


@pytest.mark.guarantee("FJ19")
@pytest.mark.parametrize("how", ["exits", "stops", "cancels all", "cancels itself"])
def test_an_event_loop_that_a_handler_ends_goes_on(url, connect, wait_for, how):
    app = make_app(url, async_workers=4)
    ran: list[str] = []
    innocent = threading.Event()

    async def leave() -> None:
        raise SystemExit(1)

    @app.job(retry=RETRY)
    async def rude(job) -> None:
        ran.append("rude")
        if how == "exits":
            task = asyncio.create_task(leave())
            await asyncio.wait([task])
            # Without this, it would log its error whenever it is collected.
            assert isinstance(task.exception(), SystemExit)
        elif how == "stops":
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0.01)
        elif how == "cancels all":
            for task in asyncio.all_tasks():
                task.cancel()
            await asyncio.sleep(10)
        else:
            current = asyncio.current_task()
            assert current is not None
            current.cancel()

    @app.job(retry=exponential(first=0.01, cap=0.01))
    async def slow(job) -> None:
        await asyncio.sleep(0.3)
        innocent.set()

    @app.job()
    async def fine(job) -> None:
        ran.append("fine")

    with heard("thread.ended") as ended, executing(app, HOME):
        with connect() as connection:
            slow.enqueue(connection)
            rude.enqueue_many(connection, [{}] * 6)
        wait_for(lambda: count(url) == 0, what="all have ended")
        assert innocent.is_set()
        with connect() as connection:
            fine.enqueue_many(connection, [{}] * 10)
        wait_for(lambda: ran.count("fine") == 10, what="the loop goes on")
    assert bool(ended) is (how in ("exits", "stops"))


@pytest.mark.guarantee("FJ19")
def test_a_listener_that_raises_ends_no_thread(url, app, connect, wait_for):
    odd = itertools.cycle(ODD)

    def fail(event, fields) -> None:
        # In the main thread this would be Ctrl-C of a user.
        if threading.current_thread() is not threading.main_thread():
            raise next(odd)()

    @app.job()
    def fine(job) -> None: ...

    before = set(threading.enumerate())
    stop = listen(fail)
    try:
        with executing(app, HOME, workers=WORKERS):
            with connect() as connection:
                fine.enqueue_many(connection, [{}] * 50)
            wait_for(lambda: count(url) == 0, what="all have run")
            assert living(before) == WORKERS
    finally:
        stop()


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FJ19")
@each
def test_an_odd_error_is_logged_in_one_short_line(caplog, make):
    emit("loop.failed", loop=make.__name__, error=make())
    (line,) = [r.getMessage() for r in caplog.records if make.__name__ in r.message]
    assert len(line) < 3_000


def test_a_secret_at_the_cut_of_a_long_error_is_not_shown():
    keep_secret(["open-sesame-open-sesame"])
    for pad in range(19_970, 20_010):
        text = describe(JobsError(pad * "\0" + "open-sesame-open-sesame" + 99 * "x"))
        assert "open" not in text
