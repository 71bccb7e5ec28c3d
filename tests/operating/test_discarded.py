"""Discarded jobs are listed, shown, retried and deleted, one and many."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from jobs_lib import Discard
from jobs_lib.operating import (
    Filter,
    delete_discarded,
    list_jobs,
    retry,
    show_job,
)
from tests.operating.helpers import add_discarded, add_job
from tests.support.apps import HOME, executing, make_app

if TYPE_CHECKING:
    from jobs_lib import Job


@pytest.mark.slow
@pytest.mark.guarantee("J16")
def test_one_command_retries_ten_thousand_jobs_that_an_outage_discarded(
    database, database_url, connect, wait_for, command
):
    app = make_app(database_url)
    down = True
    keys: dict[int, set[str]] = {}

    @app.job(group=lambda n: f"g{n % 100}")
    def work(job: Job, n: int) -> None:
        keys.setdefault(job.id, set()).add(job.idempotency_key)
        if down:
            raise Discard("the endpoint is down")

    @app.job()
    def other(job: Job) -> None:
        raise Discard("of no use")

    with psycopg.connect(database_url) as connection:
        work.enqueue_many(connection, [{"n": n} for n in range(10_000)])
        other.enqueue(connection)
    admin = connect(autocommit=True)

    def count(table: str) -> int:
        (found,) = admin.execute(f"select count(*) from jobs_lib.{table}").fetchone()
        return found

    with executing(app, HOME, batch=1_000):
        wait_for(lambda: count("discarded") == 10_001, timeout=60, what="all failed")
        down = False
        done = command("jobs", "retry", "--error", "ENDPOINT is")
        assert done.output == "retried: 10000\n"
        wait_for(lambda: count("jobs") == 0, timeout=60, what="all ran again")
    (left,) = list_jobs(database, "discarded")
    assert left.type == "other"
    assert {len(of_job) for of_job in keys.values()} == {1}
    completed = "select count(*) from jobs_lib.history where outcome = 'completed'"
    assert admin.execute(completed).fetchone() == (10_000,)
    lines = command("jobs", "show", str(left.id)).output.splitlines()
    assert any("failed at" in line for line in lines)
    assert "    jobs_lib.jobs.job.Discard: of no use" in lines
    shown = show_job(database, left.id)
    assert shown is not None
    assert [e["error"] for e in shown.errors or []] == ["Discard: of no use"]
    assert command("jobs", "delete", str(left.id)).output == "deleted: 1\n"
    assert count("discarded") == 0


def test_a_retried_job_is_the_first_of_its_group_again(
    database, database_url, connect, wait_for
):
    app = make_app(database_url)
    ran: list[int] = []

    @app.job()
    def work(job: Job) -> None:
        ran.append(job.id)

    admin = connect(autocommit=True)
    first = add_discarded(admin, group="g")
    second = add_job(admin, group="g")
    assert retry(database, [first]).retried == 1
    # They are due now, so executors find them at once, though their cursors are far
    # beyond.
    assert admin.execute(
        "select attempt, errors is not null, state, run_at <= clock_timestamp()"
        " from jobs_lib.jobs where id = %s",
        (first,),
    ).fetchone() == (0, True, "scheduled", True)
    with executing(app, HOME):
        wait_for(lambda: len(ran) == 2, what="both ran")
    assert ran == [first, second]


def test_a_retried_job_runs_at_once_although_its_id_is_behind_the_cursor(
    database, database_url, connect, wait_for
):
    app = make_app(database_url)
    ran: list[int] = []

    @app.job()
    def work(job: Job) -> None:
        ran.append(job.id)

    admin = connect(autocommit=True)
    late = add_discarded(admin, group="g")
    with executing(app, HOME):
        later = [add_job(admin, group="g") for _ in range(3)]
        wait_for(lambda: ran == later, timeout=30, what="the others ran")
        retry(database, [late])
        # This is well before the sweep of everything, once a minute, would find it.
        wait_for(lambda: ran == [*later, late], timeout=30, what="it ran")


@pytest.mark.parametrize("act", [retry, delete_discarded])
def test_a_filter_acts_on_matching_jobs_and_leaves_the_rest(database, connect, act):
    admin = connect(autocommit=True)
    jobs = {
        "type": add_discarded(admin, type="mail"),
        "group": add_discarded(admin, group="g"),
        "origin": add_discarded(admin, origin="orders/1"),
        "error": add_discarded(admin, error="timeout of 100% [x]"),
    }
    old = add_discarded(admin)
    admin.execute(
        "update jobs_lib.discarded set discarded_at = now() - interval '1 h'"
        " where id = %s",
        (old,),
    )
    filters = {
        "type": Filter(type="mail"),
        "group": Filter(group="g"),
        "origin": Filter(origin="orders/1"),
        "error": Filter(error="100% ["),
    }
    for name, chosen in filters.items():
        assert [j.id for j in list_jobs(database, "discarded", chosen)] == [jobs[name]]
        assert act(database, filter=chosen, batch=1)
        assert list_jobs(database, "discarded", chosen) == []
    recent = Filter(since=datetime.now(UTC) - timedelta(minutes=30))
    assert list_jobs(database, "discarded", recent) == []
    act(database, filter=recent)
    assert [j.id for j in list_jobs(database, "discarded")] == [old]


def test_a_job_whose_unique_key_is_taken_stays_and_is_reported(database, connect):
    admin = connect(autocommit=True)
    keyed = {"unique_key": "invoice-7"}
    taken, twin = (add_discarded(admin, **keyed) for _ in range(2))
    done = retry(database, batch=1)
    assert (done.retried, done.conflicts) == (1, [twin])
    assert [job.id for job in list_jobs(database, "discarded")] == [twin]
    assert [job.id for job in list_jobs(database)] == [taken]
    assert retry(database, [twin]).conflicts == [twin]


def test_retry_leaves_jobs_that_were_discarded_after_it_began(database, connect):
    admin = connect(autocommit=True)
    job = add_discarded(admin)
    admin.execute(
        "update jobs_lib.discarded set discarded_at = now() + interval '1 min'"
    )
    assert retry(database).retried == 0
    assert [one.id for one in list_jobs(database, "discarded")] == [job]
