"""An executor stops after one signal, after two, and when its time is over."""

from __future__ import annotations

import math
import signal
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from jobs_lib.service.stopping import describe_wait
from jobs_lib.service.supervisor import CUT_OFF
from tests.races.conftest import ORIGIN
from tests.support.apps import make_app, running

if TYPE_CHECKING:
    from jobs_lib import Job


@pytest.fixture
def start(database_url, connect, start_process, wait_for):
    """A function that starts an executor with six jobs; two of them run."""

    def start(seconds: float, grace: float):
        app = make_app(database_url)

        @app.job()
        def work(job: Job) -> None: ...

        with connect() as connection:
            work.enqueue_many(connection, [{}] * 6)
        worker = start_process(
            "slow", database_url, seconds=seconds, shutdown_timeout=grace
        )
        wait_for(
            lambda: len(said(worker, "started")) >= 2,
            timeout=60,
            what=lambda: f"two are running\n{worker.output}",
        )
        return worker

    return start


def said(worker, word: str) -> list[str]:
    """The lines of the worker that begin with this word."""
    return [line for line in worker.lines if line.startswith(word)]


def left(admin) -> list[tuple[int, int]]:
    """The attempts and crashes of the remaining jobs, each pair once."""
    return admin.execute(
        "select distinct attempt, crashes from jobs_lib.jobs"
    ).fetchall()


@pytest.mark.guarantee("U4")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_logs_the_running_jobs_and_the_effect_of_a_second_signal(
    start, wait_for, number
):
    worker = start(600.0, 300.0)
    worker.signal(number)
    wait_for(
        lambda: "stopping:" in worker.output,
        timeout=30,
        what=lambda: f"it says what it waits for\n{worker.output}",
    )
    (line,) = [line for line in worker.errors if "stopping:" in line]
    first, second = sorted(int(one.split()[1]) for one in said(worker, "started"))
    assert f"2 jobs still run, for 300 s at most: work {first}, {second}." in line
    assert "A second Ctrl-C or signal ends this process at once: then they run" in line
    worker.signal(number)
    assert worker.wait() == CUT_OFF


def test_the_jobs_a_stop_waits_for_are_listed_by_type_and_shortened():
    class Running:
        def __init__(self, type_: str, id_: int) -> None:
            self.type, self.id = type_, id_

    jobs: Any = [Running("mail", 9), *(Running("charge", n) for n in range(7, 0, -1))]
    told = describe_wait(jobs, 25)
    assert "8 jobs still run, for 25 s at most: charge 1, 2, 3, 4, 5, … (7" in told
    assert "; mail 9." in told
    assert describe_wait(jobs[:1], 25).startswith("stopping: 1 job still runs, for 25")


@pytest.mark.guarantee("FP19")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_jobs_end_and_leaves_the_rest(start, admin, number):
    worker = start(2.5, 30.0)
    worker.signal(number)
    assert worker.wait() == 0
    ended = len(said(worker, "ended"))
    assert 2 <= len(said(worker, "started")) == ended < 6
    rest = admin.execute("select count(*) from jobs_lib.jobs").fetchone()[0]
    assert rest == 6 - ended
    assert left(admin) == [(0, 0)]
    assert admin.execute("select ids from jobs_lib.claims").fetchall() == []
    owners = admin.execute("select distinct owner from jobs_lib.origins").fetchall()
    assert owners == [(None,)]


@pytest.mark.guarantee("FP19")
def test_jobs_that_outlast_the_stop_are_released_without_a_burnt_attempt(start, admin):
    worker = start(600.0, 0.5)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == CUT_OFF
    assert "jobs.released" in worker.output
    assert admin.execute("select count(*) from jobs_lib.jobs").fetchone() == (6,)
    assert left(admin) == [(0, 0)]


def claimed(admin) -> list[int]:
    """The jobs for which a crash would count."""
    return [
        job_id
        for (ids,) in admin.execute("select ids from jobs_lib.claims")
        for job_id in ids
    ]


@pytest.mark.guarantee("FP19")
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_second_signal_ends_the_executor_at_once_and_burns_no_attempt(
    start, admin, database_url, wait_for, second
):
    worker = start(600.0, 60.0)
    assert claimed(admin)
    worker.signal(signal.SIGTERM)
    wait_for(lambda: not claimed(admin), timeout=30, what="it stops")
    worker.signal(second)
    assert worker.wait(timeout=30) == CUT_OFF
    started = {line.split()[1] for line in said(worker, "started")}
    assert len(started) == 2
    assert said(worker, "ended") == []

    others_run_them_all(database_url, wait_for, started)


@pytest.mark.guarantee("FP19")
def test_sigquit_ends_the_executor_at_once_and_burns_no_attempt(
    start, admin, database_url, wait_for
):
    worker = start(600.0, 60.0)
    worker.signal(signal.SIGQUIT)
    assert worker.wait(timeout=30) == CUT_OFF
    started = {line.split()[1] for line in said(worker, "started")}
    owners = admin.execute("select distinct owner from jobs_lib.origins").fetchall()
    assert owners == [(None,)]
    others_run_them_all(database_url, wait_for, started)


@pytest.mark.guarantee("FP19")
def test_an_executor_ends_in_time_when_the_database_does_not_answer(start, admin):
    worker = start(600.0, 60.0)
    with admin.transaction():
        admin.execute("lock table jobs_lib.origins in access exclusive mode")
        worker.signal(signal.SIGQUIT)
        assert worker.wait(timeout=30) == CUT_OFF


def others_run_them_all(database_url, wait_for, started: set[str]) -> None:
    """Check that six jobs run elsewhere, each in its first attempt."""
    app = make_app(database_url)
    seen = {}

    @app.job()
    def work(job: Job) -> None:
        seen[str(job.id)] = (job.attempt, job.crashes)

    with running(app, "executor"):
        wait_for(lambda: len(seen) == 6, timeout=30, what="others run them all")
    assert started < set(seen)
    assert set(seen.values()) == {(1, 0)}


def test_a_dispatcher_that_stops_sleeps_no_more(scene, monkeypatch):
    pod = scene.pod()
    wait = Mock(return_value=[])
    monkeypatch.setattr(pod.dispatcher._wakeup, "wait", wait)
    pod.dispatcher._round(pod.round_trip)
    assert wait.call_count == 1
    # Nobody would wake it: it makes its last round because it was woken.
    pod.dispatcher._stopping.set()
    pod.dispatcher._round(pod.round_trip)
    assert wait.call_count == 1


def test_a_dispatcher_without_origins_waits_for_no_job_that_was_due(scene):
    scene.enqueue(run_at=datetime.now(UTC) + timedelta(seconds=0.5))
    pod = scene.pod(ORIGIN)
    poller = pod.dispatcher._poller
    pod.round()
    assert poller._due_at < time.monotonic() + 1
    pod.dispatcher.release(frozenset([ORIGIN]), 0.0)
    pod.dispatcher._round(pod.round_trip)
    assert not pod.claimer.cursors
    # Otherwise it would not sleep any more from then on.
    assert poller._due_at == math.inf
