"""The clock of a pod is wrong: only the database's clock decides."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from tests.faults.helpers import count, effects, enqueue
from tests.support.apps import make_app
from tests.support.clock import NEEDS_FAKETIME, faketime

MINUTES = timedelta(minutes=10)
"""More than a busy machine makes of a second, and far less than the clock's hour."""


@NEEDS_FAKETIME
def test_a_killed_process_whose_clock_was_wrong_leaves_nothing_in_memory(run_process):
    worker = run_process(
        "-c", "import time; print('up'); time.sleep(600)", env=faketime(3600)
    )
    worker.wait_for_line("up")
    left = f"*faketime*_{worker.pid}"
    assert list(Path("/dev/shm").glob(left))
    worker.close()
    assert not list(Path("/dev/shm").glob(left))


# libfaketime refuses a sleep of length zero, which dispatchers make.
@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FP15")
@NEEDS_FAKETIME
@pytest.mark.parametrize("shift", [3600, -3600])
def test_times_and_backoff_follow_the_database(
    url, admin, start_worker, wait_for, shift
):
    worker = start_worker(url, env=faketime(shift))
    (now,) = admin.execute("select clock_timestamp()").fetchone()
    due = now + timedelta(seconds=2)
    app = make_app(url)

    @app.job()
    def add(job, n: int) -> None: ...

    with psycopg.connect(url) as connection:
        add.options(run_at=due).enqueue(connection, n=1)
    enqueue(url, "fail_once", 1)
    wait_for(
        lambda: count(url) == 0, timeout=60, what=lambda: f"both ran\n{worker.output}"
    )
    assert effects(url) == [0, 1]
    at = dict(admin.execute("select n, at from effects").fetchall())
    # It runs after a backoff of at most 0.05 s, not of an hour. The other job does not
    # run an hour early. On a busy machine either may take seconds.
    assert now <= at[0] < now + MINUTES
    assert due <= at[1] < due + MINUTES
    # To others its last heartbeat seems neither old nor ahead of time.
    age = admin.execute(
        "select extract(epoch from clock_timestamp() - heartbeat_at)::float8"
        " from jobs_lib.processes"
    ).fetchone()
    assert age is not None
    assert 0 <= age[0] < MINUTES.total_seconds()
