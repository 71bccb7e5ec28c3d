"""Groups: their cost to each other, and how many run at once."""

from __future__ import annotations

import contextlib
import threading

import pytest

from jobs_lib import Job, exponential
from tests.support.apps import HOME, count, executing, heard, make_app


@pytest.mark.guarantee("S17")
def test_fifty_changes_queue_behind_an_outage_and_go_out_in_order(
    app, admin, connect, wait_for
):
    broker_is_up = threading.Event()
    sent: list[tuple[str, int]] = []

    @app.job(group="entity", retry=exponential(first=0.02, cap=0.05))
    def publish(job: Job, entity: str, change: int) -> None:
        if entity == "a" and not broker_is_up.is_set():
            raise ConnectionError("the broker is down")
        sent.append((entity, change))

    with executing(app, HOME), heard("jobs.retried") as retried:
        for change in range(50):
            with connect() as connection:
                publish.enqueue(connection, entity="a", change=change)
                publish.enqueue(connection, entity="b", change=change)
        wait_for(lambda: len(retried) >= 5, what="it has failed again and again")
        wait_for(lambda: len(sent) == 50, what="the other entity's are out")
        assert sent == [("b", change) for change in range(50)]
        broker_is_up.set()
        wait_for(lambda: len(sent) == 100, what="those that waited are out")
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert sent[50:] == [("a", change) for change in range(50)]
    # Only the first of them ever failed; the others did not even start.
    attempts = admin.execute(
        "select attempt from jobs_lib.history where \"group\" = 'a' order by id"
    ).fetchall()
    assert attempts[0][0] > 5
    assert attempts[1:] == [(1,)] * 49


@pytest.mark.guarantee("S19")
@pytest.mark.parametrize("workers", [2, 8, 20])
def test_a_thousand_groups_of_one_partition_use_all_workers(
    app, admin, connect, wait_for, workers
):
    # Each handler waits until all workers are inside handlers. So the jobs take 1,000
    # divided by the number of workers as waves, and with one thread less there would
    # not be a first wave.
    together = threading.Barrier(workers, timeout=30)
    inside = most = 0
    lock = threading.Lock()

    @app.job(group="group", retry=exponential(max_attempts=1))
    def meet(job: Job, group: str) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait()
        with lock:
            inside -= 1

    with connect() as connection:
        meet.options(origin="local/1").enqueue_many(
            connection, [{"group": f"g{n}"} for n in range(1_000)]
        )
    with executing(app, HOME, workers=workers):
        wait_for(lambda: count(admin, "history") == 1_000, timeout=60, what="all ran")
    assert most == workers
    outcomes = admin.execute("select distinct outcome from jobs_lib.history")
    assert outcomes.fetchall() == [("completed",)]


def test_a_hung_handler_holds_up_its_own_group_alone(app, admin, connect, wait_for):
    hung, leave = threading.Event(), threading.Event()
    ran: list[tuple[str, int]] = []

    @app.job(group="group")
    def work(job: Job, group: str, n: int) -> None:
        if group == "hung" and n == 0:
            hung.set()
            leave.wait(60)
        ran.append((group, n))

    with connect() as connection:
        to_one = work.options(origin="local/1")
        to_one.enqueue(connection, group="hung", n=0)
    with executing(app, HOME, workers=2):
        assert hung.wait(30)
        with connect() as connection:
            for n in range(1, 4):
                to_one.enqueue(connection, group="hung", n=n)
            to_one.enqueue_many(
                connection, [{"group": f"g{n % 20}", "n": n} for n in range(400)]
            )
        wait_for(lambda: count(admin, "history") == 400, what="the others ran")
        assert all(group != "hung" for group, _ in ran)
        leave.set()
        wait_for(lambda: count(admin, "jobs") == 0, what="then the group goes on")
    assert ran[400:] == [("hung", n) for n in range(4)]


@pytest.mark.guarantee("S25")
def test_workers_that_claim_at_once_do_not_wait_for_each_other(
    app, admin, connect, wait_for, database_url
):
    @app.job(group="group")
    def work(job: Job, n: int, group: str | None = None) -> None:
        if n % 10 == 0:
            with job.transaction() as connection:
                connection.execute("select 1")

    payloads = [{"n": n, "group": f"g{n % 70}" if n % 2 else None} for n in range(600)]
    with connect() as connection:
        for n in range(16):
            work.options(origin=f"local/{n}").enqueue_many(connection, payloads)
    waits: list[object] = []
    done = threading.Event()

    def look() -> None:
        with contextlib.closing(connect(autocommit=True)) as connection:
            while not done.is_set():
                waits.extend(
                    connection.execute(
                        "select a.application_name, l.locktype, left(a.query, 200)"
                        " from pg_locks l join pg_stat_activity a using (pid)"
                        " where not l.granted and a.datname = current_database()"
                        # Two sessions that extend the table at once wait for
                        # microseconds.
                        " and l.locktype <> 'extend'"
                    ).fetchall()
                )

    with (
        executing(app, HOME[:8], workers=2),
        executing(make_other(database_url, app), HOME[8:], workers=2),
    ):
        watcher = threading.Thread(target=look)
        watcher.start()
        wait_for(lambda: count(admin, "jobs") == 0, timeout=120, what="all ran")
        # This is half of a take-over: a claim passes by the locked origin.
        takeover = connect()
        takeover.execute(
            "select from jobs_lib.origins where origin = 'local/1' for update"
        )
        with connect() as connection:
            for origin in ("local/1", "local/3", "local/9"):
                work.options(origin=origin).enqueue(connection, n=1)
        try:
            wait_for(lambda: count(admin, "jobs") == 1, what="the other origins' ran")
            (left,) = admin.execute("select origin from jobs_lib.jobs").fetchone()
        finally:
            done.set()
            watcher.join()
            takeover.rollback()
        assert left == "local/1"
        wait_for(lambda: count(admin, "jobs") == 0, what="then that one, too")
    assert waits == []


def make_other(database_url, app):
    """The app of another pod, with the same handlers."""
    other = make_app(database_url)
    other.jobs.update(app.jobs)
    return other
