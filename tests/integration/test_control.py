"""Pause, resume, cancel and priorities, as an executor sees them."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from jobs_lib import Cancel, Job
from tests.support.apps import HOME, executing

if TYPE_CHECKING:
    from jobs_lib.jobs.type import JobType


def ended(admin) -> int:
    return admin.execute("select count(*) from jobs_lib.history").fetchone()[0]


@pytest.mark.parametrize("kind", ["type", "origin", "group"])
def test_a_paused_type_origin_or_group_waits_until_resumed_while_others_run(
    app, admin, connect, wait_for, kind
):
    ran: list[str] = []

    @app.job(group="group")
    def work(job: Job, group: str) -> None:
        ran.append(group)

    @app.job(group="group")
    def other(job: Job, group: str) -> None:
        ran.append(group)

    with connect() as connection:
        work.options(origin="local/1").enqueue(connection, group="held")
        other.options(origin="local/2").enqueue(connection, group="free")
    name = {"type": "work", "origin": "local/1", "group": "held"}[kind]
    admin.execute("insert into jobs_lib.pauses values (%s, %s)", (kind, name))
    with executing(app, HOME):
        wait_for(lambda: ended(admin) == 1, what="the other one ran")
        with connect() as connection:
            other.options(origin="local/2").enqueue(connection, group="free too")
        wait_for(lambda: ended(admin) == 2, what="another one ran")
        assert ran == ["free", "free too"]
        admin.execute("delete from jobs_lib.pauses")
        wait_for(lambda: ended(admin) == 3, what="the paused one ran")
    assert ran[-1] == "held"


@pytest.fixture
def cancel_inside(app, admin, connect, wait_for):
    """`cancel_inside(work, inside)` runs a job, and cancels it when `inside` is set."""

    def cancel(work: JobType[[]], inside: threading.Event) -> None:
        with connect() as connection:
            job_id = work.options(origin="local/1").enqueue(connection)
        with executing(app, HOME):
            assert inside.wait(30)
            admin.execute(
                "insert into jobs_lib.cancellations (id, origin)"
                " values (%s, 'local/1')",
                (job_id,),
            )
            wait_for(lambda: ended(admin) == 1, what="it ended")
        row = admin.execute("select id, outcome from jobs_lib.history").fetchone()
        assert row == (job_id, "cancelled")

    return cancel


def test_a_running_async_handler_is_cancelled(app, admin, cancel_inside):
    inside = threading.Event()

    @app.job()
    async def work(job: Job) -> None:
        inside.set()
        await asyncio.sleep(600)

    cancel_inside(work, inside)
    assert admin.execute("select * from jobs_lib.cancellations").fetchall() == []
    assert admin.execute("select * from jobs_lib.jobs").fetchall() == []


def test_a_request_among_very_many_is_heard(app, admin, cancel_inside):
    inside = threading.Event()

    @app.job()
    async def work(job: Job) -> None:
        inside.set()
        await asyncio.sleep(600)

    # A job that ended without a look at its request leaves the request for an hour.
    admin.execute(
        "insert into jobs_lib.cancellations (id, origin)"
        " select -n, 'local/1' from generate_series(1, 2000) n"
    )
    cancel_inside(work, inside)


def test_a_running_plain_handler_sees_a_flag(app, wait_for, cancel_inside):
    inside = threading.Event()

    @app.job()
    def work(job: Job) -> None:
        inside.set()
        wait_for(lambda: job.cancel_requested, what="the flag")
        raise Cancel

    cancel_inside(work, inside)


def test_high_runs_before_normal_before_batch_but_batch_never_starves(
    app, admin, connect, wait_for
):
    ran: list[str] = []

    @app.job()
    def work(job: Job, level: str) -> None:
        ran.append(level)

    with connect() as connection:
        work.options(origin="local/1").enqueue_many(
            connection, [{"level": "batch"}] * 300 + [{"level": "normal"}] * 300
        )
        work.options(origin="local/1").enqueue_many(
            connection, [{"level": "high"}] * 300
        )
        for name, priority in (("batch", -1), ("high", 1)):
            connection.execute(
                "update jobs_lib.jobs set priority = %s where payload->>'level' = %s",
                (priority, name),
            )
    with executing(app, HOME, workers=1, batch=32):
        wait_for(lambda: ended(admin) == 900, timeout=30, what="all ran")
    places = {level: [n for n, one in enumerate(ran) if one == level] for level in ran}
    high, normal, batch = (sum(places[one]) for one in ("high", "normal", "batch"))
    assert high < normal < batch
    # Four high jobs run for each normal one, until no high one is left.
    assert ran[:375].count("high") > 250
    assert ran[:375].count("normal") > 0
    half = ran[:450]
    assert half.count("high") > half.count("normal") > half.count("batch") > 0
