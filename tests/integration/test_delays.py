"""A job starts when it is due, soon after, and independently of other groups."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timedelta

import pytest

from jobs_lib import Job, exponential
from tests.support.apps import HOME, executing, make_app
from tests.support.waiting import least

STARTS_WITHIN = 2.0
"""The seconds that docs/jobs.md promises."""


@pytest.mark.guarantee("I5")
def test_no_job_starts_early_and_none_later_than_promised(
    database_url, admin, connect, wait_for
):
    admin.execute(
        "create table starts (at timestamptz default clock_timestamp(),"
        ' enqueued_at timestamptz, run_at timestamptz, "group" text)'
    )
    app = make_app(database_url, poll_interval=0.05)  # the default
    notes = connect(autocommit=True)

    @app.job(group="group", retry=exponential(first=0.2, cap=0.2))
    def work(job: Job, group: str | None = None, fail: bool = False) -> None:
        notes.execute(
            'insert into starts (enqueued_at, run_at, "group") values (%s, %s, %s)',
            (job.enqueued_at, job.run_at, group),
        )
        threading.Event().wait(0.02)
        if fail and job.attempt == 1:
            raise ValueError

    def enqueue(now: datetime) -> None:
        with connect() as connection:
            for n in range(20):
                due = now + timedelta(seconds=0.1 * n)
                work.options(run_at=due).enqueue(connection)
                work.options(run_at=due).enqueue(connection, group=f"late {n}")
                work.enqueue(connection, group=f"g{n % 4}", fail=n % 7 == 0)
            work.options(run_at=now + timedelta(days=1)).enqueue(connection)

    def measure() -> float:
        """Return the longest delay of a start."""
        admin.execute("truncate starts; delete from jobs_lib.jobs")
        (now,) = admin.execute("select clock_timestamp()").fetchone()
        enqueue(now)  # no executor owns the origins yet
        with executing(app, HOME, workers=8):
            enqueue(now)
            wait_for(
                lambda: (
                    admin.execute("select count(*) from jobs_lib.jobs").fetchone()
                    == (2,)
                ),
                timeout=30,
                what="all but those of tomorrow have run",
            )
            query = "select max(since) from jobs_lib.origins"
            (owned,) = admin.execute(query).fetchone()
        # A job may start once it exists, is due and owned, and the job before it has
        # begun.
        rows = admin.execute(
            "select at >= coalesce(run_at, at), extract(epoch from at - greatest("
            "   enqueued_at, run_at, %s,"
            '   case when "group" is not null'
            '     then lag(at) over (partition by "group" order by at) end))::float8'
            " from starts",
            (owned,),
        ).fetchall()
        assert len(rows) == 126  # six of them fail once
        assert all(not_early for not_early, _ in rows)
        return max(delay for _, delay in rows)

    assert least(measure, STARTS_WITHIN) < STARTS_WITHIN


@pytest.mark.guarantee("I10")
def test_a_failing_and_a_slow_job_delay_their_own_groups_only(
    database_url, connect, wait_for
):
    app = make_app(database_url, poll_interval=0.05)
    sender, freed = connect(autocommit=True), threading.Event()
    delays: list[float] = []
    tries: list[str] = []
    began: dict[str, list[str]] = {"fails": [], "hangs": []}

    @app.job(group="group", retry=exponential(first=0.005, cap=0.005))
    def work(job: Job, group: str, n: int, at: float = 0) -> None:
        if group not in began:
            delays.append(time.monotonic() - at)
            return
        began[group].append(str(n))
        if freed.is_set():
            return
        if group == "fails":
            tries.append(group)
            raise ValueError
        freed.wait(120)

    def measure() -> float:
        """The 99th percentile of the starts of some hundred jobs of many groups."""
        delays.clear()
        for n in range(200):
            with sender.transaction():
                work.enqueue(sender, group=f"g{n % 40}", n=n, at=time.monotonic())
        wait_for(lambda: len(delays) == 200, timeout=30, what="all others have started")
        return sorted(delays)[197]

    with executing(app, HOME, workers=4):
        measure()  # to warm up
        calm = measure()
        with connect() as connection:
            for n in range(20):
                work.enqueue(connection, group="fails", n=n)
                work.enqueue(connection, group="hangs", n=n)
        wait_for(lambda: tries and began["hangs"], what="one fails, and one hangs")
        bound = 2 * calm + 0.25
        struck = least(measure, bound)
        # In their own groups no other job starts.
        assert set(began["fails"]) == set(began["hangs"]) == {"0"}
        assert len(tries) > 5
        freed.set()
        wait_for(lambda: began["hangs"][-1] == "19", what="the group goes on")
    assert struck < bound
