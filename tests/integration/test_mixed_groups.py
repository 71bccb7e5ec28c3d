"""Groups hold jobs of several types, and some types run only the last job."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest

from jobs_lib import Job, RetryAfter
from tests.support.apps import HOME, count, executing, heard


def outcomes(admin) -> dict[tuple[str, str], int]:
    """Count the outcomes of the jobs of each type."""
    rows = admin.execute(
        "select type, outcome, count(*) from jobs_lib.history group by 1, 2"
    )
    return {(name, outcome): number for name, outcome, number in rows}


@pytest.fixture
def mixed(app):
    """The types of one group, and their jobs that have run, in order."""
    ran: list[tuple[str, int]] = []

    @app.job(group="entity", last_only=True)
    def publish(job: Job, entity: str, n: int) -> None:
        ran.append(("publish", n))

    @app.job(group="entity", last_only=True)
    def index(job: Job, entity: str, n: int) -> None:
        ran.append(("index", n))

    @app.job(group="entity")
    def book(job: Job, entity: str, n: int) -> None:
        ran.append(("book", n))

    return publish, index, book, ran


@pytest.mark.parametrize("first", ["publish", "book"])
def test_only_the_last_job_runs_although_jobs_of_another_type_lie_between(
    app, mixed, admin, connect, wait_for, first
):
    publish, _, book, ran = mixed
    types = (publish, book) if first == "publish" else (book, publish)
    with connect() as connection:
        for n in range(20):
            for job_type in types:
                job_type.enqueue(connection, entity="e", n=n)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    books = [("book", n) for n in range(20)]
    assert sorted(ran) == [*books, ("publish", 19)]
    assert [one for one in ran if one[0] == "book"] == books
    # The last job keeps its own place among the others.
    assert ran.index(("publish", 19)) == (19 if first == "publish" else 20)
    assert outcomes(admin) == {
        ("book", "completed"): 20,
        ("publish", "superseded"): 19,
        ("publish", "completed"): 1,
    }


def test_two_types_that_run_last_only_share_groups(
    app, mixed, admin, connect, wait_for
):
    publish, index, _, ran = mixed
    with connect() as connection:
        for n in range(20):
            for entity in "ab":
                publish.enqueue(connection, entity=entity, n=n)
                index.enqueue(connection, entity=entity, n=n)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert sorted(ran) == [("index", 19)] * 2 + [("publish", 19)] * 2


def test_the_last_job_runs_behind_hundreds_of_another_type(
    app, mixed, admin, connect, wait_for
):
    publish, _, book, ran = mixed
    with connect() as connection:
        publish.enqueue(connection, entity="e", n=1)
        book.enqueue_many(connection, [{"entity": "e", "n": n} for n in range(700)])
        publish.enqueue(connection, entity="e", n=2)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert ran == [*(("book", n) for n in range(700)), ("publish", 2)]


def test_the_last_job_waits_behind_a_scheduled_job_of_another_type(
    app, mixed, admin, connect, wait_for
):
    publish, _, book, ran = mixed
    with connect() as connection:
        publish.enqueue(connection, entity="e", n=1)
        later = book.options(run_at=datetime.now(UTC) + timedelta(hours=1)).enqueue(
            connection, entity="e", n=1
        )
        publish.enqueue(connection, entity="e", n=2)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 1, what="the older has ended")
        assert outcomes(admin) == {("publish", "superseded"): 1}
        admin.execute(
            "update jobs_lib.jobs set run_at = clock_timestamp() where id = %s",
            (later,),
        )
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert ran == [("book", 1), ("publish", 2)]


def test_a_job_enqueued_while_the_group_is_busy_supersedes_older_ones(
    app, admin, connect, wait_for
):
    begun, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    @app.job(group="entity")
    def book(job: Job, entity: str) -> None:
        begun.set()
        assert go_on.wait(30)

    @app.job(group="entity", last_only=True)
    def publish(job: Job, entity: str, n: int) -> None:
        ran.append(n)

    with connect() as connection:
        # Both jobs exist when the group is claimed.
        book.enqueue(connection, entity="e")
        publish.enqueue(connection, entity="e", n=0)
    with executing(app, HOME):
        assert begun.wait(30)
        for n in range(1, 20):
            with connect() as connection:
                publish.enqueue(connection, entity="e", n=n)
        go_on.set()
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert ran == [19]


@pytest.mark.parametrize("options", [{}, {"debounce": 0.05, "max_wait": 1.0}])
@pytest.mark.parametrize("between", [False, True])
def test_a_failed_last_only_job_gives_way_to_a_newer_one_at_once(
    app, admin, connect, wait_for, options, between
):
    ran: list[int] = []

    @app.job(group="entity", last_only=True, **options)
    def publish(job: Job, entity: str, n: int) -> None:
        ran.append(n)
        if n == 1:
            raise RetryAfter(3_600)

    @app.job(group="entity")
    def book(job: Job, entity: str) -> None:
        ran.append(0)

    with executing(app, HOME), connect() as connection:
        with heard("jobs.retried") as retried:
            publish.enqueue(connection, entity="e", n=1)
            connection.commit()
            wait_for(lambda: ran == [1] and retried, what="it has failed")
        if between:
            book.enqueue(connection, entity="e")
            connection.commit()
        publish.enqueue(connection, entity="e", n=2)
        connection.commit()
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert ran == ([1, 0, 2] if between else [1, 2])
    assert outcomes(admin) == {
        ("publish", "superseded"): 1,
        ("publish", "completed"): 1,
        **({("book", "completed"): 1} if between else {}),
    }


def test_a_last_only_job_that_fails_while_a_newer_one_waits_gives_way_at_once(
    app, admin, connect, wait_for
):
    begun, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    @app.job(group="entity", last_only=True)
    def publish(job: Job, entity: str, n: int) -> None:
        ran.append(n)
        if n == 1:
            begun.set()
            assert go_on.wait(30)
            raise RetryAfter(3_600)

    with executing(app, HOME), connect() as connection:
        publish.enqueue(connection, entity="e", n=1)
        connection.commit()
        assert begun.wait(30)
        publish.enqueue(connection, entity="e", n=2)
        connection.commit()
        go_on.set()
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert ran == [1, 2]


def test_a_failed_last_only_job_gives_way_under_a_new_owner(
    app, mixed, admin, connect, wait_for
):
    publish, _, book, ran = mixed
    with connect() as connection:
        failed = publish.enqueue(connection, entity="e", n=1)
        book.enqueue(connection, entity="e", n=1)
        publish.enqueue(connection, entity="e", n=2)
    admin.execute(
        "update jobs_lib.jobs set state = 'scheduled', attempt = 1,"
        " run_at = clock_timestamp() + interval '1 hour' where id = %s",
        (failed,),
    )
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert ran == [("book", 1), ("publish", 2)]


def test_a_failed_last_only_job_keeps_its_pause_without_a_newer_one(
    app, admin, connect, wait_for
):
    begun, go_on = threading.Event(), threading.Event()
    ran: list[str] = []

    @app.job(group="entity", last_only=True, debounce=0.01, max_wait=0.01)
    def publish(job: Job, entity: str) -> None:
        ran.append("publish")
        begun.set()
        assert go_on.wait(30)
        raise RetryAfter(3_600)

    @app.job(group="entity")
    def book(job: Job, entity: str) -> None:
        ran.append("book")

    with executing(app, HOME), connect() as connection:
        publish.enqueue(connection, entity="e")
        connection.commit()
        assert begun.wait(30)
        book.enqueue(connection, entity="e")
        # Jobs of another group follow: once these have run, so have the failure's
        # effects.
        with heard("jobs.retried") as retried:
            connection.commit()
            go_on.set()
            wait_for(lambda: retried, what="it has failed")
        for n in range(5):
            book.enqueue(connection, entity=f"other {n}")
            connection.commit()
            wait_for(lambda n=n: len(ran) == n + 2, what="another group has run")
    assert ran == ["publish", *["book"] * 5]
    left = admin.execute(
        "select type, attempt, run_at > clock_timestamp() + interval '50 minutes'"
        " from jobs_lib.jobs order by id"
    )
    assert left.fetchall() == [("publish", 1, True), ("book", 0, None)]
