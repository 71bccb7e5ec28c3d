"""A flood of one group, type or priority does not keep others from starting."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.support.apps import HOME, executing, make_app
from tests.support.waiting import least

if TYPE_CHECKING:
    from jobs_lib import Job

FLOOD = 1_000_000


@pytest.fixture
def app(database_url):
    """An app without Kafka that looks for jobs at the usual pace."""
    return make_app(database_url, poll_interval=0.05)


def flood(admin) -> None:
    """Insert a million rows of one group into one origin, and update the statistics."""
    admin.execute(
        'insert into jobs_lib.jobs (origin, type, "group", payload)'
        " select 'local/1', 'flood', 'flood', '{\"group\": \"flood\"}'"
        " from generate_series(1, %s)",
        (FLOOD,),
    )
    admin.execute("analyze jobs_lib.jobs")


@pytest.mark.slow
@pytest.mark.guarantee("J18", "FJ15")
@pytest.mark.parametrize("stuck", [False, True], ids=["quick", "saturated"])
def test_a_job_behind_a_million_of_one_group_starts_within_a_second(
    app, admin, connect, wait_for, stuck
):
    started: list[float] = []
    running, leave = threading.Event(), threading.Event()

    @app.job(group="group", name="flood")
    def fill(job: Job, group: str | None = None) -> None:
        running.set()
        if stuck:
            leave.wait(120)

    @app.job(group="group")
    def small(job: Job, group: str | None = None) -> None:
        started.append(time.monotonic())

    def start_small(origin: str, group: str | None) -> float:
        """Return after how many seconds a job of another group or origin starts."""
        before = len(started)
        with connect() as connection:
            small.options(origin=origin).enqueue(connection, group=group)
        enqueued = time.monotonic()
        wait_for(lambda: len(started) > before, what="it starts")
        return started[-1] - enqueued

    flood(admin)
    with executing(app, HOME):
        # The executor has just started, and has read almost none of the million.
        assert running.wait(30)
        for origin, group in [
            ("local/1", "small"),  # another group
            ("local/1", None),  # another type, without a group
            ("local/3", "far"),  # another origin
        ] * 3:
            start = partial(start_small, origin, group)
            assert least(start, 1.0) < 1.0, (origin, group)
        (left,) = admin.execute(
            "select count(*) from jobs_lib.jobs where type = 'flood'"
        ).fetchone()
        assert left > FLOOD / 2, "there was no flood to stand behind"
        leave.set()


@pytest.mark.guarantee("J12")
def test_the_lowest_priority_runs_under_a_constant_load_of_the_highest(
    app, admin, connect, wait_for
):
    started: dict[int, float] = {}
    order: list[int] = []
    over = threading.Event()
    ran = 0

    @app.job(priority="high")
    def load(job: Job) -> None:
        nonlocal ran
        ran += 1

    @app.job(group="group", priority="batch")
    def low(job: Job, n: int, group: str | None = None) -> None:
        started[n] = time.monotonic()
        if group:
            order.append(n)

    def keep_up() -> None:
        # More jobs of the highest priority wait at all times than a claim takes.
        with connect(autocommit=True) as connection:
            while not over.is_set():
                (waiting,) = connection.execute(
                    "select count(*) from jobs_lib.jobs where priority = 1"
                ).fetchone()
                if waiting < 5_000:
                    with connection.transaction():
                        load.options(origin="local/1").enqueue_many(
                            connection, [{}] * 5_000
                        )

    def start_low() -> float:
        """Return after how many seconds a job of the lowest priority starts."""
        n = len(started)
        with connect() as connection:
            low.options(origin="local/1").enqueue(connection, n=n)
        enqueued = time.monotonic()
        wait_for(lambda: n in started, timeout=30, what="the low one runs")
        return started[n] - enqueued

    feeder = threading.Thread(target=keep_up)
    feeder.start()
    try:
        with executing(app, HOME, batch=200):
            wait_for(lambda: ran > 2_000, what="the load is on")
            for _ in range(5):
                assert least(start_low, 2.0) < 2.0
            # A group runs in its order, whatever the priorities of its jobs are.
            with connect() as connection:
                for n in range(100, 130):
                    level = ("high", "normal", "batch")[n % 3]
                    mixed = low.options(origin="local/1", priority=level)
                    mixed.enqueue(connection, n=n, group="g")
            wait_for(lambda: len(order) == 30, what="the group has run")
            (waiting,) = admin.execute(
                "select count(*) from jobs_lib.jobs where priority = 1"
            ).fetchone()
            assert waiting > 0, "the load was not constant"
            over.set()
    finally:
        over.set()
        feeder.join()
    assert order == list(range(100, 130))


@pytest.mark.parametrize("groups", [False, True], ids=["alone", "groups"])
def test_jobs_released_after_a_long_wait_for_a_worker_keep_their_place(
    app, connect, wait_for, monkeypatch, groups
):
    # Jobs that no worker begins are released at once, as behind slow handlers.
    monkeypatch.setattr("jobs_lib.executor.dispatcher._HOARDED", 0.01)
    begun: list[int] = []

    @app.job(group="group")
    def work(job: Job, n: int, group: str | None = None) -> None:
        begun.append(n)
        time.sleep(0.1)

    names = (f"g{n}" if groups else None for n in range(60))
    jobs = [{"n": n, "group": name} for n, name in enumerate(names)]
    with connect() as connection:
        work.options(origin="local/1").enqueue_many(connection, jobs)
    with executing(app, HOME, workers=2):
        wait_for(lambda: len(begun) == len(jobs), timeout=60, what="all have begun")
    print(begun)
    late = [n - place for place, n in enumerate(begun)]
    assert max(map(abs, late)) < 10, begun
