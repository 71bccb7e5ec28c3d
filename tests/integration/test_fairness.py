"""A flood of one group, type or priority does not keep the others from starting."""

from __future__ import annotations

import threading
import time

import pytest

from jobs_lib import Job
from tests.support.apps import executing, make_app

HOME = [f"local/{n}" for n in range(16)]
FLOOD = 1_000_000


@pytest.fixture
def app(database_url):
    """An app without Kafka, with the usual pace of looking for jobs."""
    return make_app(database_url, poll_interval=0.05)


@pytest.fixture
def admin(connect):
    """A connection to look with."""
    return connect(autocommit=True)


def flood(admin, rows: int, group: str | None = "flood") -> None:
    """Rows of one group, all in one origin, and statistics as in real life."""
    admin.execute(
        'insert into jobs_lib.jobs (origin, type, "group", payload)'
        " select 'local/1', 'flood', %s, '{}' from generate_series(1, %s)",
        (group, rows),
    )
    admin.execute("analyze jobs_lib.jobs")


@pytest.mark.slow
@pytest.mark.guarantee("J18", "FJ15")
@pytest.mark.parametrize("by", ["group", "type", "origin"])
@pytest.mark.parametrize("stuck", [False, True], ids=["quick", "saturated"])
def test_one_job_behind_a_million_of_another_group_starts_within_a_second(
    app, admin, connect, wait_for, stuck, by
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

    # A million rows of one group; of one type without groups, it is the handlers that
    # are busy, and the small one is in the same origin, or in another one.
    flood(admin, FLOOD, "flood")
    one = fill if by == "group" else small
    one = small
    origin = "local/3" if by == "origin" else "local/1"

    def enqueue() -> float:
        with connect() as connection:
            one.options(origin=origin).enqueue(
                connection, group=None if by == "type" else "small"
            )
        return time.monotonic()

    with executing(app, HOME):
        # Just started: it has seen next to nothing of the million.
        assert running.wait(30)
        for _ in range(5):
            before = len(started)
            enqueued = enqueue()
            wait_for(lambda n=before: len(started) > n, what="it starts")
            assert started[-1] - enqueued < 1.0
        (left,) = admin.execute(
            "select count(*) from jobs_lib.jobs where type = 'flood'"
        ).fetchone()
        assert left > FLOOD / 2, "there was no flood to stand behind"
        leave.set()
