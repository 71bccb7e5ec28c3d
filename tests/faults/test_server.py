"""PostgreSQL goes away under a running executor, in several ways, and comes back."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.faults.helpers import Use, attempts, count, effects, enqueue

JOBS = 300


def stop_fast(server) -> None:
    server.stop(keep_data=True)


def stop_immediately(server) -> None:
    os.kill(server.pid, signal.SIGQUIT)
    server.stop(keep_data=True)


def kill(server) -> None:
    server.kill()


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FP6", "J20", "O5")
@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(stop_fast, marks=pytest.mark.slow),
        pytest.param(stop_immediately, marks=pytest.mark.slow),
        kill,
    ],
)
def test_an_executor_outlives_its_server(
    own_server, own_url, start_worker, wait_for, stop
):
    worker = start_worker(own_url)
    for name in ("slow", "add", "aadd"):
        enqueue(own_url, name, JOBS)
    wait_for(lambda: len(effects(own_url)) > 50, timeout=60, what="some have run")
    stop(own_server)
    # Running jobs may reach their end first.
    wait_for(lambda: "loop.failed" in worker.output, timeout=60, what="it has noticed")
    use = Use(worker)
    idle_until = time.monotonic() + 3
    wait_for(lambda: time.monotonic() > idle_until, what="the server is away")
    share, lines = use.share, use.lines
    own_server.start()
    back_at = time.monotonic()
    before = len(effects(own_url))
    wait_for(
        lambda: len(effects(own_url)) > before or before == 2 * JOBS,
        timeout=20,
        what=lambda: f"it goes on\n{worker.output}",
    )
    went_on_after = time.monotonic() - back_at
    wait_for(
        lambda: count(own_url) == 0,
        timeout=40,
        what=lambda: f"all have run\n{worker.output}",
    )
    assert worker.running
    assert share < 0.1
    assert lines <= 8, worker.output
    assert went_on_after < 12
    assert effects(own_url) == sorted([*range(JOBS)] * 2)
    assert attempts(own_url) == {("completed", 1)}


@pytest.mark.expects("loop.failed")
def test_sessions_that_are_ended_cost_no_attempt(
    url, admin, start_worker, wait_for, connect
):
    worker = start_worker(url)
    enqueue(url, "add", JOBS)
    enqueue(url, "aadd", JOBS)
    ended = 0
    for goal in (50, 200, 350):
        wait_for(
            lambda goal=goal: len(effects(url)) > goal, timeout=60, what="some have run"
        )
        rows = admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'jobs_lib %%'"
            " and datname = current_database()"
        )
        ended += len(rows.fetchall())
    assert ended > 15
    wait_for(
        lambda: count(url) == 0,
        timeout=40,
        what=lambda: f"all have run\n{worker.output}",
    )
    assert worker.running
    assert effects(url) == sorted([*range(JOBS)] * 2)
    assert attempts(url) == {("completed", 1)}
