"""An origin changes hands while its jobs run: the hand-over waits up to a limit."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from jobs_lib.executor import Executor
from jobs_lib.ownership import Ownership, Process, Source
from tests.support.apps import heard, make_app

if TYPE_CHECKING:
    from jobs_lib import Job

pytestmark = pytest.mark.expects("fenced")

ORIGIN = "local/3"


@pytest.fixture
def running_job(database_url, connect, wait_for):
    """Let a job of the origin run in a pod with this limit for hand-overs.

    `source, may_end = running_job(seconds)`: the job ends when `may_end` is set.
    """
    stopping = []
    may_end = threading.Event()

    def start(seconds: float) -> tuple[Source, threading.Event]:
        app = make_app(database_url)
        begun = threading.Event()

        @app.job()
        def work(job: Job) -> None:
            begun.set()
            assert may_end.wait(60)

        database, settings = app.database(), app.settings
        process = Process(database, "pod", ["execute"], 0.2, types=app.jobs)
        executor = Executor(
            database, app.jobs, process.id, UUID(int=1), settings, app.middleware
        )
        source = Source()
        ownership = Ownership(
            database,
            process,
            "execute",
            source,
            executor,
            interval=0.05,
            stale_after=settings.stale_after,
            handover_timeout=seconds,
        )
        for part in (process, executor, ownership):
            part.start()
            stopping.append(part)
        source.assign([ORIGIN])
        with connect() as connection:
            work.options(origin=ORIGIN).enqueue(connection)
        wait_for(begun.is_set, what="the job runs")
        return source, may_end

    yield start
    may_end.set()
    for part in reversed(stopping):
        part.stop()


def is_free(admin) -> bool:
    return admin.execute(
        "select owner is null from jobs_lib.origins"
        " where role = 'execute' and origin = %s",
        (ORIGIN,),
    ).fetchone() == (True,)


def outcomes(admin) -> list[tuple[str, int]]:
    return admin.execute("select outcome, attempt from jobs_lib.history").fetchall()


@pytest.mark.guarantee("I4", "FK1", "S13")
def test_an_origin_is_free_once_its_running_job_has_ended_and_been_settled(
    running_job, admin, wait_for
):
    source, may_end = running_job(60)
    with heard("origins.released") as released:
        source.revoke([ORIGIN])
        # The ownership notices within a tenth of this time.
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            assert not is_free(admin)
        may_end.set()
        wait_for(lambda: released, what="it is given up")
    assert is_free(admin)
    # The job need not run again: its outcome was stored before the origin was free.
    assert outcomes(admin) == [("completed", 1)]
    assert [fields["late"] for _, fields in released] == [False]


@pytest.mark.expects("jobs.fenced")
@pytest.mark.guarantee("I4", "FK1", "I7")
def test_an_origin_is_free_when_the_time_is_over_and_its_job_commits_nothing(
    running_job, admin, wait_for
):
    source, may_end = running_job(0.3)
    with heard("origins.released") as released:
        begun = time.monotonic()
        source.revoke([ORIGIN])
        wait_for(lambda: released, what="it is given up")
    assert time.monotonic() - begun >= 0.3
    assert is_free(admin)
    assert [fields["late"] for _, fields in released] == [True]
    with heard("job.ran") as ran:
        may_end.set()
        wait_for(lambda: ran, what="its handler has ended")
    assert outcomes(admin) == []
    # The job waits for the next owner, and has lost no attempt.
    assert admin.execute("select attempt from jobs_lib.jobs").fetchall() == [(0,)]
