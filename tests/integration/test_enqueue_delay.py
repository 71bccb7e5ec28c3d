"""The database's clock counts a delay, for one job and for many."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine

from jobs_lib import App, EnqueueError, Job
from tests.support.apps import HOME, executing, make_app
from tests.support.engines import sqlalchemy_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib import Draft
    from jobs_lib.jobs.type import JobType

ENQUEUE = {
    "one": lambda work, conn: work.enqueue(conn, n=1),
    "many": lambda work, conn: work.enqueue_many(conn, [{"n": 1}, {"n": 2}]),
}


@pytest.fixture
def app(database_url: str) -> App:
    return make_app(database_url)


@pytest.fixture
def work(app: App) -> JobType[Any]:
    @app.job(group="n")
    def work(job: Job, n: int) -> None: ...

    return work


@pytest.fixture(params=ENQUEUE)
def enqueue(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return ENQUEUE[request.param]


@pytest.mark.parametrize("delay", [timedelta(minutes=10), 600, 600.0])
def test_a_delay_counts_from_the_call_by_the_databases_clock(
    database_url, work, admin, enqueue, delay, monkeypatch
):
    # The clock of the process is years behind, and the session writes dates in its own
    # way.
    monkeypatch.setattr("time.time", lambda: 0.0)
    with psycopg.connect(database_url) as connection:
        connection.execute("set datestyle = 'german'; set timezone = 'Asia/Kathmandu'")
        # The transaction is older: the delay does not count from its begin.
        connection.execute("select pg_sleep(0.05)")
        (before,) = admin.execute("select clock_timestamp()").fetchone()
        enqueue(work.options(delay=delay), connection)
        (after,) = admin.execute("select clock_timestamp()").fetchone()
    rows = admin.execute("select state, run_at from jobs_lib.jobs").fetchall()
    assert {state for state, _ in rows} == {"scheduled"}
    assert len({run_at for _, run_at in rows}) == 1
    for _, run_at in rows:
        assert before <= run_at - timedelta(minutes=10) <= after


def test_a_delay_works_with_a_driver_without_copy(database_url, work, admin, enqueue):
    url = sqlalchemy_url(database_url).set(drivername="postgresql+psycopg2")
    engine = create_engine(url)
    with engine.begin() as connection:
        enqueue(work.options(delay=600), connection)
    engine.dispose()
    assert admin.execute(
        "select distinct state, run_at > clock_timestamp() + interval '9 minutes'"
        " from jobs_lib.jobs"
    ).fetchall() == [("scheduled", True)]


def test_a_delay_of_zero_makes_a_job_available(database_url, work, admin, enqueue):
    with psycopg.connect(database_url) as connection:
        enqueue(work.options(delay=0), connection)
    assert admin.execute("select distinct state from jobs_lib.jobs").fetchall() == [
        ("available",)
    ]


def test_a_delayed_job_runs_when_its_delay_is_over(app, connect, wait_for):
    early: list[bool] = []

    @app.job()
    def late(job: Job) -> None:
        assert job.run_at is not None
        early.append(datetime.now(UTC) < job.run_at)

    with executing(app, HOME):
        late.options(delay=0.2).enqueue(app)
        wait_for(lambda: early == [False], what="it ran, and not before")
    app.close()


@pytest.mark.parametrize(
    ("delay", "match"),
    [
        (-1, r"delay of 'work' is -1, and must be 0 seconds to 100 years"),
        (timedelta(seconds=-1), r"must be 0 seconds"),
        (math.nan, r"is nan, and must be"),
        (math.inf, r"is inf, and must be"),
        (10**400, r"and must be 0 seconds"),
        (timedelta.max, r"and must be 0 seconds"),
        (True, r"must be a timedelta or a number of seconds, not True"),
        ("5", r"must be a timedelta or a number of seconds, not '5'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_invalid_delay_is_refused(work, delay, match):
    with pytest.raises(EnqueueError, match=match):
        work.options(delay=delay)


def test_a_time_and_a_delay_at_once_are_refused_and_the_later_call_counts(work):
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    with pytest.raises(
        EnqueueError, match=r"'work' is given both a run_at and a delay"
    ):
        work.options(run_at=tomorrow, delay=5)
    assert work.options(delay=5).options(run_at=tomorrow).options_.delay is None
    assert work.options(run_at=tomorrow).options(delay=5).options_.run_at is None
    assert work.options(delay=5).options(priority="high").options_.delay == 5


def test_a_hook_sees_and_changes_a_delay(app, work, admin):
    seen: list[Any] = []

    @app.enqueue_middleware
    def double(draft: Draft, call_next: Callable[[Draft], Any]) -> Any:
        seen.append(draft.delay)
        draft.delay = 7_200
        return call_next(draft)

    work.options(delay=60).enqueue(app, n=1)
    app.close()
    assert seen == [60]
    assert admin.execute(
        "select run_at > clock_timestamp() + interval '1 hour' from jobs_lib.jobs"
    ).fetchall() == [(True,)]
