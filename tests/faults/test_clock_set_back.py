"""The server's clock was set back by an hour: the stored times lie ahead of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from jobs_lib import Rate
from jobs_lib.ownership import Process
from tests.support.apps import HOME, executing, make_app, running

if TYPE_CHECKING:
    from jobs_lib import Job

pytestmark = pytest.mark.expects("fenced")

AHEAD = "clock_timestamp() + interval '1 hour'"


@pytest.mark.guarantee("FP23")
def test_a_rate_goes_on_after_the_clock_was_set_back(
    database_url, admin, connect, wait_for
):
    app = make_app(database_url)
    ran: list[int] = []

    @app.job(rate=Rate(20, 1))
    def work(job: Job, n: int) -> None:
        ran.append(n)

    admin.execute(f"insert into jobs_lib.rates values ('work', 0.2, {AHEAD})")
    with connect() as connection:
        for n in range(10):
            work.enqueue(connection, n=n)
    with executing(app, HOME):
        wait_for(lambda: len(ran) == 10, timeout=60, what="all have run")


@pytest.mark.guarantee("FP23")
def test_a_rate_is_not_exceeded_after_the_clock_was_set_back(admin):
    admin.execute(f"insert into jobs_lib.rates values ('work', 0, {AHEAD})")
    row = admin.execute("select * from jobs_lib.take_starts('work', 0.01, 1, 5)")
    granted, seconds = row.fetchone()
    assert granted == 0
    assert 90 < seconds <= 100


@pytest.mark.guarantee("FP23", "S14")
def test_a_dead_process_counts_as_dead_after_the_clock_was_set_back(
    database_url, admin, connect, wait_for
):
    app = make_app(database_url)
    ran: list[int] = []

    @app.job()
    def work(job: Job) -> None:
        ran.append(job.id)

    dead = uuid4()
    admin.execute(
        "insert into jobs_lib.processes"
        " (id, pod, roles, host, pid, version, heartbeat_at)"
        f" values (%s, 'p', '{{execute}}', 'h', 1, '0', {AHEAD})",
        (dead,),
    )
    admin.execute(
        "insert into jobs_lib.origins (role, origin, owner, epoch)"
        " select 'execute', 'local/' || n, %s, 4 from generate_series(0, 15) n",
        (dead,),
    )
    with connect() as connection:
        work.options(origin="local/3").enqueue(connection)
    with running(app, "executor"):
        wait_for(lambda: len(ran) == 1, timeout=30, what="the job has run")


@pytest.mark.guarantee("FP23")
def test_a_live_process_stays_alive_after_the_clock_was_set_back(
    database, admin, wait_for
):
    one, other = (Process(database, "pod", ["execute"], 0.05) for _ in range(2))
    one.start()
    other.start()
    seen: set[int] = set()
    live = (
        "select count(*) from jobs_lib.processes where heartbeat_at"
        " > clock_timestamp() - interval '2 seconds'"
    )
    until = time.monotonic() + 1
    while time.monotonic() < until:
        admin.execute(f"update jobs_lib.processes set heartbeat_at = {AHEAD}")
        seen.add(admin.execute(live).fetchone()[0])
    wait_for(
        lambda: (
            not admin.execute(
                "select from jobs_lib.processes where heartbeat_at"
                " > clock_timestamp() + interval '1 second'"
            ).rowcount
        ),
        what="no heartbeat lies in the future",
    )
    seen.add(admin.execute(live).fetchone()[0])
    one.stop()
    other.stop()
    assert seen == {2}
