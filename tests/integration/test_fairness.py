"""A flood of one group, type or priority does not keep the others from starting."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.apps import executing, make_app

if TYPE_CHECKING:
    from jobs_lib import Job

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


def flood(admin) -> None:
    """A million rows of one group in one origin, and the statistics to that."""
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
def test_what_comes_behind_a_million_of_one_group_starts_within_a_second(
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

    flood(admin)
    with executing(app, HOME):
        # It has just started, and seen next to nothing of the million.
        assert running.wait(30)
        for origin, group in [
            ("local/1", "small"),  # another group
            ("local/1", None),  # another type, without a group
            ("local/3", "far"),  # another origin
        ] * 3:
            before = len(started)
            with connect() as connection:
                small.options(origin=origin).enqueue(connection, group=group)
            enqueued = time.monotonic()
            wait_for(lambda n=before: len(started) > n, what="it starts")
            assert started[-1] - enqueued < 1.0, (origin, group)
        (left,) = admin.execute(
            "select count(*) from jobs_lib.jobs where type = 'flood'"
        ).fetchone()
        assert left > FLOOD / 2, "there was no flood to stand behind"
        leave.set()
