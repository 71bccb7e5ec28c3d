"""Retry now: jobs in backoff by id and by filter, and the reason if one is left."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib import Job, exponential
from jobs_lib.errors import OperatingError
from jobs_lib.operating import Filter, cancel, retries, retry
from jobs_lib.operating.discarded import move_discarded
from tests.operating.helpers import add_claim, add_discarded, add_job, add_owner
from tests.support.apps import HOME, executing, make_app

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

LATER = datetime.now(UTC) + timedelta(days=1)


def add_failed(
    connection: psycopg.Connection[Any],
    error: str = "OSError: HTTP 503",
    at: datetime | None = None,
    **columns: Any,
) -> int:
    """Add a job in backoff until tomorrow; return its id."""
    at = at or datetime.now(UTC) - timedelta(seconds=1)
    errors = [{"attempt": 2, "at": at.isoformat(), "error": error}]
    return add_job(
        connection,
        state="scheduled",
        run_at=LATER,
        errors=json.dumps(errors),
        **{"attempt": 2, **columns},
    )


def find_due(connection: psycopg.Connection[Any]) -> list[int]:
    """Find the jobs that were scheduled and are due."""
    rows = connection.execute(
        "select id from jobs_lib.jobs where state = 'scheduled'"
        " and run_at <= clock_timestamp() order by id"
    )
    return [row[0] for row in rows]


def test_a_job_in_backoff_runs_at_once_and_its_attempts_stay_as_counted(
    database, database_url, connect, wait_for
):
    app = make_app(database_url)
    attempts: list[int] = []

    @app.job(group="n", retry=exponential(first=3_600, cap=3_600))
    def work(job: Job, n: int) -> None:
        attempts.append(job.attempt)
        if job.attempt < 3:
            raise OSError("HTTP 503")

    admin = connect(autocommit=True)

    def waits(attempt: int) -> bool:
        return bool(
            admin.execute(
                "select from jobs_lib.jobs where attempt = %s and state = 'scheduled'"
                " and run_at > clock_timestamp()",
                (attempt,),
            ).rowcount
        )

    with connect() as connection:
        job = work.enqueue(connection, n=1)
    with executing(app, HOME):
        wait_for(lambda: waits(1), timeout=30, what="the first attempt failed")
        assert retry(database, [job]).retried == 1
        wait_for(lambda: waits(2), timeout=30, what="the second attempt failed")
        assert retry(database, filter=Filter(type="work", error="503")).retried == 1
        wait_for(lambda: attempts == [1, 2, 3], timeout=30, what="the third attempt")


def test_a_filter_takes_jobs_in_backoff_beside_discarded_ones_and_no_others(
    database, connect
):
    admin = connect(autocommit=True)
    other = add_failed(admin, type="other", group="g", origin="orders/1")
    taken = [add_failed(admin, group=f"g{n}", origin=f"local/{n}") for n in range(5)]
    again = add_discarded(admin)
    delayed = add_job(admin, state="scheduled", run_at=LATER)
    snoozed = add_failed(admin, "Snooze: they open at nine", attempt=0)
    limited = add_failed(admin, "RateLimited: 5 in 60 s", attempt=0)
    # Each batch has one job: the next one continues where the last one ended.
    assert retry(database, filter=Filter(type="work"), batch=1).retried == 6
    assert find_due(admin) == [*taken, again]
    assert not {other, delayed, snoozed, limited} & set(find_due(admin))
    for chosen in (
        Filter(type="nothing"),
        Filter(group="g1"),
        Filter(origin="orders/2"),
        Filter(error="HTTP 404"),
        Filter(since=datetime.now(UTC) + timedelta(seconds=60)),
    ):
        assert retry(database, filter=chosen).retried == 0
    old = add_failed(admin, at=datetime.now(UTC) - timedelta(days=2))
    recent = Filter(since=datetime.now(UTC) - timedelta(days=1), type="work")
    assert retry(database, filter=recent).retried == 0
    for chosen in (Filter(origin="orders/1"), Filter(error="http 503", type="work")):
        assert retry(database, filter=chosen).retried == 1
    assert {other, old} <= set(find_due(admin))


def test_many_jobs_with_one_time_are_retried_in_batches(database, connect):
    admin = connect(autocommit=True)
    jobs = [add_failed(admin) for _ in range(7)]
    assert retry(database, batch=3).retried == 7
    assert find_due(admin) == jobs


def test_a_delayed_or_snoozed_job_runs_now_if_its_id_is_given(database, connect):
    admin = connect(autocommit=True)
    delayed = add_job(admin, state="scheduled", run_at=LATER)
    snoozed = add_failed(admin, "Snooze: they open at nine", attempt=0)
    assert retry(database, [delayed, snoozed]).retried == 2
    assert find_due(admin) == [delayed, snoozed]


def test_each_job_that_is_left_has_its_reason(database, connect):
    admin = connect(autocommit=True)
    owner = add_owner(admin, types=["work"])
    running = add_job(admin, group="g")
    behind = add_job(admin, group="g")
    ready, cancelled = add_job(admin), add_job(admin)
    add_claim(admin, owner, running)
    cancel(database, [cancelled])
    limited = add_failed(admin, "RateLimited: 5 in 60 s", attempt=0)
    due = add_job(admin, state="scheduled", run_at=LATER - timedelta(days=2))
    paused = add_job(admin, type="paused")
    admin.execute("insert into jobs_lib.pauses values ('type', 'paused')")
    expected = {
        running: ("running", "claimed at"),
        behind: ("behind", f"behind job {running}, the head of its group 'g'"),
        ready: ("ready", "nothing keeps it"),
        cancelled: ("finished", "cancelled at"),
        limited: ("rate_limited", "rate limited until"),
        due: ("ready", "nothing keeps it"),
        paused: ("paused", "type 'paused' is paused since"),
        4711: ("never_existed", "it never existed"),
    }
    done = retry(database, expected)
    assert done.retried == 0
    assert {job: reason.code for job, reason in done.left.items()} == {
        job: code for job, (code, _) in expected.items()
    }
    for job, (_, text) in expected.items():
        assert done.left[job].text.startswith(text)
    failed = add_failed(admin)
    left = retry(database, [failed], Filter(type="other")).left
    assert left[failed].code == "filtered"
    assert "it has failed 2 times" in left[failed].text


def test_the_retry_command_names_the_jobs_it_left_and_why(command, connect):
    admin = connect(autocommit=True)
    failed, available = add_failed(admin), add_job(admin)
    delayed = add_job(admin, state="scheduled", run_at=LATER)
    none = command("jobs", "retry", "--type", "work", "--error", "HTTP 404")
    assert none.output.splitlines() == [
        "retried: 0",
        "no such job has failed; unfinished: 2 scheduled, 1 available",
    ]
    assert none.exit_code == 0
    done = command("jobs", "retry", str(failed), str(available), "4711")
    lines = done.output.splitlines()
    assert lines[0] == "retried: 1"
    assert lines[1].startswith(f"not retried: {available}, no process owns its origin")
    assert lines[2].startswith("not retried: 4711, it never existed")
    assert done.exit_code == 1
    told = json.loads(command("jobs", "retry", "4711", "--json").output)
    assert told["left"]["4711"]["code"] == "never_existed"
    assert find_due(admin) == [failed]
    assert command("jobs", "retry", str(delayed)).output == "retried: 1\n"


def test_a_retry_neither_waits_for_a_promotion_nor_stops_it(database, connect):
    admin, executor = connect(autocommit=True), connect()
    held, free = add_failed(admin), add_failed(admin)
    # This is the statement of a promotion, held open before its commit.
    executor.execute("select from jobs_lib.origins for share")
    executor.execute(
        "update jobs_lib.jobs set state = 'available' where id = %s", (held,)
    )
    done: list[int] = []
    operator = threading.Thread(
        target=lambda: done.append(retry(database, filter=Filter(type="work")).retried)
    )
    operator.start()
    operator.join(timeout=30)
    assert done == [1]
    assert find_due(admin) == [free]
    executor.commit()


def test_retry_leaves_jobs_that_failed_after_it_began(database, connect):
    admin = connect(autocommit=True)
    job = add_failed(admin, at=datetime.now(UTC) + timedelta(minutes=1))
    assert retry(database).retried == 0
    assert retry(database, [job]).retried == 0
    assert find_due(admin) == []


def test_a_job_that_becomes_due_during_a_retry_is_left_and_the_retry_ends(
    database, connect, monkeypatch
):
    admin = connect(autocommit=True)
    failed_at = datetime.now(UTC) - timedelta(minutes=5)
    waiting = [add_failed(admin, origin="local/1", at=failed_at) for _ in range(5)]
    due = add_failed(admin, origin="local/2", at=failed_at)
    admin.execute(
        "update jobs_lib.jobs set run_at = clock_timestamp() - interval '1 minute'"
        " where id = %s",
        (due,),
    )
    # The retry has taken so long that the last job became due meanwhile.
    began = "select clock_timestamp() - interval '2 minutes'"
    monkeypatch.setitem(database.queries._queries, "database_time", began)
    batches: list[str] = []
    execute = retries._Run._execute

    def count(run: retries._Run, query: str, **values: Any) -> list[tuple[Any, ...]]:
        batches.append(query)
        assert len(batches) < 50, "the retry takes the same job again and again"
        return execute(run, query, **values)

    monkeypatch.setattr(retries._Run, "_execute", count)
    assert retry(database, batch=1).retried == len(waiting)
    assert find_due(admin) == [*waiting, due]


def test_a_retry_that_is_locked_out_says_what_the_batches_before_have_changed(
    database, connect, monkeypatch
):
    admin, other = connect(autocommit=True), connect()
    for _ in range(2):
        add_discarded(admin)
        add_failed(admin)
    monkeypatch.setattr("jobs_lib.operating.session.LOCK_SECONDS", 0.1)

    def lock_out(batches: Iterator[Any], said: str) -> None:
        next(batches)
        other.execute("lock table jobs_lib.jobs")
        with pytest.raises(OperatingError, match=rf"waited 0\.1 s in vain .*{said}"):
            next(batches)
        other.rollback()

    discarded = move_discarded(database, None, Filter(), batch=1)
    lock_out(discarded, "the batches before changed 1")
    # The jobs that were moved before count, too.
    scheduled = retries._bring_forward(database, None, Filter(), 1, 1)
    lock_out(scheduled, "the batches before changed 2")


def test_a_retry_tells_what_it_has_done_though_nobody_can_say_why_others_are_left(
    database, connect, monkeypatch
):
    admin = connect(autocommit=True)
    job = add_discarded(admin)

    def explain(*_, **__):
        raise OperatingError("took longer than 10 s and was stopped")

    monkeypatch.setattr(retries, "explain", explain)
    done = retry(database, [job, 4711])
    assert (done.retried, [*done.left]) == (1, [4711])
    left = done.left[4711]
    assert (left.code, "took longer" in left.text) == ("unknown", True)


def test_a_batch_of_no_job_is_refused(database):
    with pytest.raises(OperatingError, match="1 job or more, not 0"):
        retry(database, batch=0)
