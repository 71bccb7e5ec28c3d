"""A cancel removes waiting jobs, asks running jobs to stop, and waits for claims."""

from __future__ import annotations

import contextlib
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from jobs_lib import Discard
from jobs_lib.errors import FencedError, OperatingError, TopicError
from jobs_lib.operating import Filter, cancel, explain, retry
from jobs_lib.operating.home_topic import repartition
from tests.operating.helpers import add_claim, add_discarded, add_job, add_owner
from tests.support.apps import HOME, count, executing, make_app

if TYPE_CHECKING:
    from jobs_lib import Job

LATER = datetime.now(UTC) + timedelta(days=1)


def test_a_waiting_job_goes_and_the_history_says_so(database, connect):
    admin = connect(autocommit=True)
    first, second = add_job(admin, group="g"), add_job(admin, group="g", attempt=2)
    assert cancel(database, [second, 4711]) == {second: "cancelled", 4711: "missing"}
    assert admin.execute("select id from jobs_lib.jobs").fetchall() == [(first,)]
    assert admin.execute(
        'select id, outcome, attempt, "group",'
        " keep_until - (now() at time zone 'UTC')::date from jobs_lib.history"
    ).fetchall() == [(second, "cancelled", 2, "g", 1)]
    assert explain(database, second).codes == ["finished"]
    assert cancel(database, [first], keep=0) == {first: "cancelled"}
    assert admin.execute("select count(*) from jobs_lib.history").fetchone() == (1,)


@pytest.mark.parametrize("silent", [0.0, 60.0], ids=["live", "dead"])
def test_a_claimed_job_is_asked_to_stop_unless_its_owner_is_dead(
    database, connect, silent
):
    admin = connect(autocommit=True)
    claimed, waiting = add_job(admin), add_job(admin)
    add_claim(admin, add_owner(admin, silent=silent), claimed)
    became = cancel(database, [claimed, waiting])
    assert became[waiting] == "cancelled"
    assert became[claimed] == ("cancelled" if silent else "requested")
    asked = admin.execute("select id, origin from jobs_lib.cancellations").fetchall()
    assert asked == ([] if silent else [(claimed, "local/3")])
    if not silent:
        assert cancel(database, [claimed]) == {claimed: "requested"}
        assert explain(database, claimed).codes == ["running", "cancel_requested"]


def cancel_behind(holder, database, admin, job: int, wait_for) -> dict[int, str]:
    """Cancel a job while another transaction holds a lock, which commits then."""
    became: dict[int, str] = {}
    operator = threading.Thread(target=lambda: became.update(cancel(database, [job])))
    operator.start()
    wait_for(
        lambda: admin.execute(
            "select true from pg_stat_activity where wait_event_type = 'Lock'"
            " and application_name = 'jobs_lib cancel'"
        ).fetchone(),
        what="the operator waits for the other transaction",
    )
    holder.commit()
    operator.join()
    return became


def test_a_job_that_is_just_being_retried_is_cancelled_all_the_same(
    database, connect, wait_for
):
    admin, other = connect(autocommit=True), connect()
    job = add_job(admin, state="scheduled", run_at=LATER)
    retrying = "update jobs_lib.jobs set run_at = clock_timestamp() where id = %s"
    other.execute(retrying, (job,))
    assert cancel_behind(other, database, admin, job, wait_for) == {job: "cancelled"}
    assert count(admin, "jobs") == 0


def test_cancelling_waits_for_the_claim_in_flight_and_then_sees_it(
    database, connect, wait_for
):
    admin, executor = connect(autocommit=True), connect()
    job = add_job(admin)
    owner = add_owner(admin)
    # This is the statement of a claim, held open before its commit.
    executor.execute("select from jobs_lib.origins for share")
    add_claim(executor, owner, job)
    became = cancel_behind(executor, database, admin, job, wait_for)
    assert became == {job: "requested"}


def test_no_job_moves_to_another_origin_while_it_is_cancelled(
    database, database_url, connect, monkeypatch
):
    app = make_app(database_url)

    @app.job(group="key")
    def work(job: Job, key: str) -> None: ...

    with connect() as connection:
        jobs = [work.enqueue(connection, f"k{n}") for n in range(20)]
    queries = dict(database.queries)

    class Moving(dict[str, Any]):
        def __getitem__(self, name):
            if name == "lock_jobs_origins":
                # The jobs were looked for, and no lock is taken yet.
                with contextlib.suppress(TopicError):
                    repartition(app, 5, wait=0.1)
            return queries[name]

    monkeypatch.setattr(database, "queries", Moving(queries))
    assert cancel(database, jobs) == dict.fromkeys(jobs, "cancelled")


def test_a_cancellation_locks_an_origin_that_never_had_an_owner(database, connect):
    admin = connect(autocommit=True)
    job = add_job(admin, origin="orders/5")
    assert cancel(database, [job]) == {job: "cancelled"}
    assert admin.execute(
        "select owner, epoch from jobs_lib.origins where origin = 'orders/5'"
    ).fetchone() == (None, 0)


def test_cancel_refuses_too_many_jobs_and_waits_for_a_lock_for_a_limited_time(
    database, connect, monkeypatch
):
    with pytest.raises(OperatingError, match=r"at most 1,000 jobs at once, not 1,001"):
        cancel(database, range(1, 1_002))
    monkeypatch.setattr("jobs_lib.operating.session.LOCK_SECONDS", 0.1)
    admin, other = connect(autocommit=True), connect()
    job = add_job(admin)
    add_owner(admin)
    other.execute("select from jobs_lib.origins for update")
    with pytest.raises(OperatingError, match=r"waited 0\.1 s in vain"):
        cancel(database, [job])
    other.rollback()
    assert cancel(database, [job]) == {job: "cancelled"}


def test_every_job_is_either_cancelled_or_runs_while_executors_claim(
    database, database_url, connect, wait_for
):
    app = make_app(database_url)

    @app.job()
    def work(job: Job, n: int) -> None:
        try:
            with job.transaction() as connection:
                connection.execute("insert into effects values (%s)", (n,))
        except FencedError:
            lost.append(n)

    lost: list[int] = []
    admin = connect(autocommit=True)
    admin.execute("create table effects (n int)")
    with psycopg.connect(database_url) as connection:
        work.enqueue_many(connection, [{"n": n} for n in range(400)])
    found = [row[0] for row in admin.execute("select id from jobs_lib.jobs order by 1")]
    became: dict[int, str] = {}
    with executing(app, HOME, workers=2, batch=20):
        for start in range(0, 400, 20):
            became |= cancel(database, found[start : start + 20])
        wait_for(
            lambda: (
                admin.execute(
                    "select not exists (select from jobs_lib.jobs)"
                ).fetchone()
                == (True,)
            ),
            what="nothing is left",
        )
    ran = admin.execute("select count(*) from effects").fetchone()
    # The executor cancels jobs that were claimed and had not started.
    row = admin.execute(
        "select count(*) from jobs_lib.history where outcome = 'cancelled'"
    ).fetchone()
    assert row is not None
    assert row[0] >= sum(one == "cancelled" for one in became.values())
    assert ran == (400 - row[0],)
    assert lost == []


@pytest.mark.guarantee("J14")
def test_a_job_that_was_asked_to_stop_and_is_retried_runs_to_its_end(
    database, database_url, connect, wait_for
):
    app = make_app(database_url)
    inside, asked = threading.Event(), threading.Event()
    runs: list[bool] = []

    @app.job()
    def work(job: Job) -> None:
        if not inside.is_set():
            inside.set()
            assert asked.wait(30)
            raise Discard("it ends with its own error")
        runs.append(job.cancel_requested)

    admin = connect(autocommit=True)
    with connect() as connection:
        job = work.enqueue(connection)
    with executing(app, HOME):
        wait_for(inside.is_set, what="it runs")
        assert cancel(database, [job]) == {job: "requested"}
        asked.set()
        wait_for(lambda: explain(database, job).codes == ["discarded"], what="its end")
        assert count(admin, "cancellations") == 0
        assert retry(database, [job]).retried == 1
        wait_for(lambda: explain(database, job).codes == ["finished"], what="its run")
    assert runs == [False]
    outcomes = admin.execute("select outcome from jobs_lib.history order by 1")
    assert outcomes.fetchall() == [("completed",), ("discarded",)]


@pytest.mark.guarantee("J14")
def test_a_retry_takes_back_the_request_to_stop_only_if_the_job_is_named(
    database, connect
):
    admin = connect(autocommit=True)
    later = {"state": "scheduled", "run_at": LATER, "errors": '[{"error": "E"}]'}
    named, chosen = add_job(admin, **later), add_job(admin, **later)
    # The request came while the discard was written, which did not see it.
    discarded, conflict = add_discarded(admin), add_discarded(admin, unique_key="k")
    add_job(admin, unique_key="k")
    for job in (named, chosen, discarded, conflict):
        admin.execute(
            "insert into jobs_lib.cancellations (id, origin) values (%s, 'local/3')",
            (job,),
        )
    assert retry(database, [named, discarded, conflict]).retried == 2
    left = "select id from jobs_lib.cancellations order by 1"
    assert admin.execute(left).fetchall() == [(chosen,), (conflict,)]
    assert retry(database, filter=Filter(error="E")).retried == 1
    assert admin.execute(left).fetchall() == [(chosen,), (conflict,)]
