"""Rate limits: how many jobs of a type start, over all pods."""

from __future__ import annotations

import time

import pytest

from jobs_lib import Job, Rate
from jobs_lib.operating import explain
from jobs_lib.testing import Jobs
from tests.support.apps import HOME, executing, make_app

pytestmark = pytest.mark.expects("fenced")


@pytest.fixture
def admin(connect):
    """A connection for the test to look with, and a table of the jobs' starts."""
    admin = connect(autocommit=True)
    admin.execute("create table starts (at timestamptz, pod text, n int, attempt int)")
    return admin


def make_pod(url, name, rate, *, group=None, asynchronous=False):
    """An app with a type that has a rate, and one that has none."""
    app = make_app(url)
    statement = "insert into starts values (to_timestamp(%s), %s, %s, %s)"

    if asynchronous:

        @app.job(name="limited", rate=rate)
        async def limited(job: Job, n: int) -> None:
            # Before it waits for a connection.
            at = time.time()
            async with job.transaction() as connection:
                await connection.execute(statement, (at, name, n, job.attempt))
    else:

        @app.job(name="limited", rate=rate, group=group)
        def limited(job: Job, n: int) -> None:
            at = time.time()
            with job.transaction() as connection:
                connection.execute(statement, (at, name, n, job.attempt))

    @app.job()
    def free(job: Job) -> None: ...

    return app


def seconds(admin):
    """The time of each start of a limited job, in order."""
    rows = admin.execute("select extract(epoch from at)::float8 from starts order by 1")
    return [at for (at,) in rows]


def unfinished(admin, type_):
    query = "select count(*) from jobs_lib.jobs where type = %s"
    return admin.execute(query, (type_,)).fetchone()[0]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
def test_a_rate_holds_over_all_pods_and_burns_no_attempt(
    admin, connect, database_url, wait_for, asynchronous
):
    rate, jobs = Rate(20), 70
    pods = [
        make_pod(database_url, name, rate, asynchronous=asynchronous)
        for name in ("one", "two")
    ]
    with connect() as connection:
        pods[0].jobs["limited"].enqueue_many(
            connection, [{"n": n} for n in range(jobs)]
        )
    with executing(pods[0], HOME[:8]), executing(pods[1], HOME[8:]):
        wait_for(lambda: not unfinished(admin, "limited"), timeout=60, what="all ran")
    at = seconds(admin)
    assert len(at) == jobs
    # One second's worth more than the rate; a start is noted a little after it.
    late = 0.25
    for first in range(jobs):
        for last in range(first, jobs):
            most = 20 * (at[last] - at[first] + late) + 20
            assert last - first + 1 <= most, (at[first], at[last])
    rows = admin.execute("select distinct pod, attempt from starts").fetchall()
    assert sorted(rows) == [("one", 1), ("two", 1)]


def test_a_group_keeps_its_order(admin, connect, database_url, wait_for):
    app = make_pod(database_url, "one", Rate(10), group=lambda n: "g")
    with connect() as connection:
        app.jobs["limited"].enqueue_many(connection, [{"n": n} for n in range(15)])
    with executing(app, HOME):
        wait_for(lambda: not unfinished(admin, "limited"), timeout=40, what="all ran")
    ran = admin.execute("select n from starts order by at").fetchall()
    assert [n for (n,) in ran] == list(range(15))


def test_explain_names_the_rate_that_a_job_waits_for_while_other_types_run(
    admin, connect, database, database_url, wait_for
):
    app = make_pod(database_url, "one", Rate(1, per=3_600))
    with connect() as connection:
        limited = app.jobs["limited"]
        jobs = [limited.enqueue(connection, n=n) for n in range(3)]

    def told():
        reasons = [reason for job in jobs for reason in explain(database, job).reasons]
        return [reason.text for reason in reasons if reason.code == "rate_limited"]

    with executing(app, HOME):
        wait_for(lambda: len(told()) == 2, what="one has run, and two wait")
        with connect() as connection:
            app.jobs["free"].enqueue_many(connection, [{}] * 100)
        wait_for(lambda: not unfinished(admin, "free"), what="the others have run")
        assert all("1 starts in 3,600 s over all pods" in text for text in told())
        assert len(told()) == 2
    assert len(seconds(admin)) == 1


def test_the_test_kit_waits_for_no_rate(admin, database_url):
    app = make_pod(database_url, "kit", Rate(1, per=3_600))
    with Jobs(app, database_url) as jobs:
        with jobs.transaction() as connection:
            app.jobs["limited"].enqueue_many(connection, [{"n": n} for n in range(3)])
        assert jobs.drain() == 3
    assert len(seconds(admin)) == 3


@pytest.mark.parametrize(("starts", "per"), [(0, 1), (1, 0), (-1, 1), (1, 1e9)])
def test_an_invalid_rate_is_refused(starts, per):
    with pytest.raises(ValueError, match=f"starts={starts}"):
        Rate(starts, per)
