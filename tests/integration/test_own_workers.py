"""A slow type with workers of its own takes no worker from the others."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from jobs_lib import ConfigurationError, Job, Workers
from tests.support.apps import HOME, count, executing, make_app, running


@pytest.mark.guarantee("J31")
def test_slow_jobs_with_workers_of_their_own_leave_the_others_free(
    app, admin, connect, wait_for, gate
):
    running: list[int] = []
    quick: list[int] = []

    @app.job(workers=2)
    def report(job: Job, n: int) -> None:
        running.append(n)
        gate.wait(30)

    @app.job()
    def mail(job: Job, n: int) -> None:
        quick.append(n)

    with connect() as connection:
        report.enqueue_many(connection, [{"n": n} for n in range(500)])
        mail.enqueue_many(connection, [{"n": n} for n in range(500)])
    with executing(app, HOME):
        wait_for(lambda: len(quick) == 500, what="all quick jobs have run")
        wait_for(lambda: len(running) == 2, what="both workers are busy")
        assert len(running) == 2
        gate.set()
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert sorted(running) == list(range(500))


def test_types_with_workers_of_their_own_run_while_all_others_are_busy(
    app, connect, wait_for, gate
):
    busy: list[int] = []
    ran: list[int] = []

    @app.job()
    def slow(job: Job, n: int) -> None:
        busy.append(n)
        gate.wait(30)

    @app.job(workers=1)
    def urgent(job: Job, n: int) -> None:
        ran.append(n)

    with connect() as connection:
        slow.enqueue_many(connection, [{"n": n} for n in range(200)])
    with executing(app, HOME, workers=4):
        wait_for(lambda: len(busy) == 4, what="all workers are busy")
        with connect() as connection:
            urgent.enqueue_many(connection, [{"n": n} for n in range(200)])
        wait_for(lambda: len(ran) == 200, what="the others have run")
        assert len(busy) == 4
        gate.set()


def test_types_with_equal_workers_share_them(app, connect, wait_for, gate):
    reports = Workers(2, "reports")
    running: list[str] = []

    @app.job(workers=reports)
    def weekly(job: Job) -> None:
        running.append("weekly")
        gate.wait(30)

    @app.job(workers=Workers(2, "reports"))
    def daily(job: Job) -> None:
        running.append("daily")
        gate.wait(30)

    with connect() as connection:
        for _ in range(5):
            weekly.enqueue(connection)
            daily.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: len(running) == 2, what="both workers are busy")
        time.sleep(0.2)  # a third one would have started by now
        assert len(running) == 2
        gate.set()
        wait_for(lambda: len(running) == 10, what="all have run")


def test_async_handlers_have_workers_of_their_own_too(app, connect, wait_for, gate):
    running: list[int] = []
    others: list[int] = []

    @app.job(workers=3)
    async def crawl(job: Job, n: int) -> None:
        running.append(n)
        while not gate.is_set():
            await asyncio.sleep(0.01)

    @app.job()
    async def ping(job: Job, n: int) -> None:
        others.append(n)

    with connect() as connection:
        crawl.enqueue_many(connection, [{"n": n} for n in range(50)])
        ping.enqueue_many(connection, [{"n": n} for n in range(50)])
    with executing(app, HOME):
        wait_for(lambda: len(others) == 50, what="the others have run")
        wait_for(lambda: len(running) == 3, what="all three are busy")
        assert len(running) == 3
        gate.set()
        wait_for(lambda: len(running) == 50, what="all have run")


def test_workers_of_plain_handlers_have_no_event_loop(app, admin, connect, wait_for):
    loops: set[int] = set()

    def find_loops() -> set[int]:
        return {
            thread.ident or 0
            for thread in threading.enumerate()
            if thread.name == "jobs_lib loop"
        }

    @app.job(workers=1)
    def report(job: Job) -> None:
        loops.update(find_loops() - before)

    @app.job()
    async def ping(job: Job) -> None: ...

    before = find_loops()
    with connect() as connection:
        report.enqueue(connection)
        ping.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert len(loops) == 1


def test_a_group_goes_on_from_one_section_to_the_other_in_order(
    app, admin, connect, wait_for
):
    ran: dict[str, list[int]] = {}
    lock = threading.Lock()

    def note(key: str, n: int) -> None:
        with lock:
            ran.setdefault(key, []).append(n)

    @app.job(group="key")
    def book(job: Job, key: str, n: int) -> None:
        note(key, n)

    @app.job(group="key", workers=2)
    def print_(job: Job, key: str, n: int) -> None:
        note(key, n)

    @app.job(group="key", workers=1)
    def send(job: Job, key: str, n: int) -> None:
        note(key, n)

    types: list[Any] = [book, print_, send, book, book, send, send, print_]
    expected = {f"k{k}": list(range(40)) for k in range(30)}
    with executing(app, HOME):
        for n in range(40):
            with connect() as connection:
                for key in expected:
                    types[n % len(types)].enqueue(connection, key=key, n=n)
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert ran == expected


def test_a_group_that_waits_for_a_failed_job_of_another_section_goes_on(
    app, admin, connect, wait_for
):
    ran: list[str] = []

    @app.job(group="key", workers=1)
    def charge(job: Job, key: str) -> None:
        ran.append(f"charge {job.attempt}")
        if job.attempt < 3:
            raise ValueError("not yet")

    @app.job(group="key")
    def ship(job: Job, key: str) -> None:
        ran.append("ship")

    with connect() as connection:
        charge.enqueue(connection, key="a")
        ship.enqueue(connection, key="a")
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert ran == ["charge 1", "charge 2", "charge 3", "ship"]


def test_the_settings_change_the_number_of_workers(
    database_url, admin, connect, wait_for, gate
):
    app = make_app(database_url, own_workers={"reports": 3})
    running: list[int] = []

    @app.job(workers=Workers(1, "reports"))
    def report(job: Job, n: int) -> None:
        running.append(n)
        gate.wait(30)

    with connect() as connection:
        report.enqueue_many(connection, [{"n": n} for n in range(50)])
    with executing(app, HOME):
        wait_for(lambda: len(running) == 3, what="three workers are busy")
        gate.set()
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")


def test_workers_that_no_type_has_are_refused_at_the_start(database_url):
    app = make_app(database_url, own_workers={"raports": 3})

    @app.job(workers=Workers(1, "reports"))
    def report(job: Job) -> None: ...

    with (
        pytest.raises(ConfigurationError, match=r"raports.*reports"),
        running(app, "executor"),
    ):
        pass


@pytest.mark.parametrize("given", [0, -1, 1.5, "2", True, 1_001, Workers(2, "")])
def test_an_invalid_number_of_workers_is_refused(app, given):
    with pytest.raises(ConfigurationError, match="the workers of 'report' are"):

        @app.job(workers=given)
        def report(job: Job) -> None: ...


def test_two_numbers_for_the_same_workers_are_refused(app):
    @app.job(workers=Workers(2, "reports"))
    def weekly(job: Job) -> None: ...

    with pytest.raises(ConfigurationError, match=r"2 for 'weekly'|'weekly'.*3"):

        @app.job(workers=Workers(3, "reports"))
        def daily(job: Job) -> None: ...
