"""Only failures of a handler and crashes count as attempts."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib import Job, exponential
from tests.support import wait_for
from tests.support.apps import HOME, executing, heard, make_app, running

if TYPE_CHECKING:
    from jobs_lib import App


def left(admin) -> int:
    return admin.execute("select count(*) from jobs_lib.jobs").fetchone()[0]


# Notes for how many seconds each failed attempt makes its job wait.
# Before the update, at the moment at which a row gets its time: the triggers after it
# come once all rows of the statement are written.
NOTE_DELAYS = """
create table delays (attempt int, delay float8);
create function note() returns trigger language plpgsql as $$
begin
    insert into delays
    values (new.attempt, extract(epoch from new.run_at - clock_timestamp()));
    return new;
end $$;
create trigger note before update on jobs_lib.jobs for each row
when (new.state = 'scheduled') execute function note();
"""


@pytest.mark.guarantee("I6")
def test_attempts_are_numbered_without_gaps_and_wait_within_their_bounds(
    database_url, admin, connect
):
    admin.execute(NOTE_DELAYS)
    app = make_app(database_url)
    retry = exponential(first=0.05, factor=2, cap=0.15, max_attempts=5)
    runs: defaultdict[int, list[int]] = defaultdict(list)

    def fail(job: Job) -> None:
        runs[job.id].append(job.attempt)
        raise ValueError(job.attempt)

    @app.job(retry=retry)
    def plain(job: Job) -> None:
        fail(job)

    @app.job(retry=retry, group="group")
    async def waiting(job: Job, group: str) -> None:
        fail(job)

    with connect() as connection:
        plain.enqueue_many(connection, [{}] * 40)
        waiting.enqueue_many(connection, [{"group": f"g{n}"} for n in range(40)])
    with executing(app, HOME):
        wait_for(lambda: left(admin) == 0, what="all are given up")
    assert len(runs) == 80
    assert all(attempts == [1, 2, 3, 4, 5] for attempts in runs.values())
    delays = admin.execute(
        "select attempt, count(*), min(delay), max(delay), avg(delay) from delays"
        " group by 1 order by 1"
    ).fetchall()
    assert [row[:2] for row in delays] == [(n, 80) for n in (1, 2, 3, 4)]
    for (_, _, least, most, mean), bound in zip(
        delays, [0.05, 0.1, 0.15, 0.15], strict=True
    ):
        # The delay lies between zero and the bound; the trigger sees it a moment later.
        assert least > -0.05
        assert bound * 0.7 < most <= bound
        assert bound * 0.2 < mean < bound * 0.7
    numbers = admin.execute(
        "select distinct attempt, (select array_agg(e->'attempt' order by n)::text"
        " from jsonb_array_elements(errors) with ordinality as t(e, n))"
        " from jobs_lib.discarded"
    ).fetchall()
    assert numbers == [(5, "{1,2,3,4,5}")]


# Fails when a job is deleted. That is a completion, by the executor or in a job's own
# transaction.
FAIL = """
create sequence failures;
create function fail() returns trigger language plpgsql as $$
begin
    if nextval('public.failures') % 40 = 0 then
        raise exception 'made to fail' using errcode = '55P03';
    end if;
    return old;
end $$;
create trigger fail before delete on jobs_lib.jobs for each row execute function fail();
"""


class Work:
    """Jobs of several pods, whose handlers and completions fail at times."""

    def __init__(self, url: str, admin: Any, connect: Any) -> None:
        admin.execute("create table effects (job bigint)")
        admin.execute(FAIL)
        self._url = url
        self._admin = admin
        self._connect = connect
        self.starts: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """(attempt, crashes) of each start, by job."""
        self.failing: set[int] = set()
        """The jobs whose handler has failed; each fails once."""
        self.cut = threading.Event()
        """Lets the jobs of the type `hang` end."""

    def make(self, pod: str) -> App:
        """Make the app of a pod."""
        # No pod counts as dead, so a busy machine adds no run.
        app = make_app(
            self._url, pod=pod, workers=4, shutdown_timeout=0.2, stale_after=20.0
        )

        @app.job(retry=exponential(first=0.01, cap=0.01))
        def add(job: Job, n: int) -> None:
            self.starts[job.id].append((job.attempt, job.crashes))
            if n % 10 == 0 and job.attempt == 1:
                self.failing.add(job.id)
                raise ValueError(n)
            with job.transaction() as connection:
                connection.execute("insert into effects values (%s)", (job.id,))
                threading.Event().wait(0.005)

        @app.job(retry=exponential(first=0.01, cap=0.01))
        def hang(job: Job) -> None:
            self.starts[job.id].append((job.attempt, job.crashes))
            self.cut.wait(60)

        return app

    def enqueue(self, app: App, jobs: int) -> None:
        """Enqueue jobs of the type `add`."""
        with self._connect() as connection:
            app.jobs["add"].enqueue_many(connection, [{"n": n} for n in range(jobs)])

    def hang(self, app: App, origin: str, jobs: int) -> set[int]:
        """Enqueue jobs of the type `hang` in an origin, and wait until they run."""
        with self._connect() as connection:
            hanging = app.jobs["hang"].options(origin=origin)
            hung = {hanging.enqueue(connection) for _ in range(jobs)}
        wait_for(lambda: hung <= self.starts.keys(), timeout=30, what="they hang")
        return hung

    def cut_connections(self) -> None:
        """End the sessions of executors and handlers, and wait until jobs run again."""
        before = len(self.starts)
        self._admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name ~ '^jobs_lib (executor|handlers) '"
        )
        wait_for(
            lambda: len(self.starts) > before or left(self._admin) == 0,
            what="it goes on",
        )

    def await_end(self) -> None:
        """Wait until all jobs have ended."""
        wait_for(lambda: left(self._admin) == 0, timeout=60, what="all have run")

    def check(self, *, effects: int, ran: list[tuple[str, dict[str, Any]]]) -> None:
        """Check that only failures of handlers were counted."""
        failures = self._admin.execute("select last_value >= 40 from failures")
        assert failures.fetchone() == (True,), "no completion has failed"
        ended = self._admin.execute("select id, outcome, attempt from jobs_lib.history")
        rows = ended.fetchall()
        assert len(rows) == len(self.starts)
        for job, outcome, attempt in rows:
            errors = [f["error"] for _, f in ran if f["job"].id == job and f["error"]]
            expected = ("completed", 2 if job in self.failing else 1)
            assert (outcome, attempt) == expected, (self.starts[job], errors)
        runs = {run for of_job in self.starts.values() for run in of_job}
        assert runs == {(1, 0), (2, 0)}
        found = self._admin.execute("select count(*), count(distinct job) from effects")
        assert found.fetchone() == (effects, effects)


@pytest.fixture
def work(database_url, admin, connect) -> Work:
    """Jobs whose attempts are noted."""
    return Work(database_url, admin, connect)


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("I7")
def test_rebalances_and_shutdowns_spend_no_attempt(work, admin):
    first, second = work.make("first"), work.make("second")
    with heard("job.ran") as ran, running(first, "executor"):
        work.enqueue(first, 100)
        wait_for(lambda: len(work.starts) > 20, what="some have run")
        with heard("jobs.released") as released, running(second, "executor") as pod:
            # A rebalance comes while jobs run, and then a shutdown that cuts them off.
            mine = "select origin from jobs_lib.origins where owner = %s"
            wait_for(
                lambda: admin.execute(mine, (pod.process.id,)).fetchone(),
                what="the second has a share",
            )
            (origin,) = admin.execute(mine, (pod.process.id,)).fetchone()
            hung = work.hang(first, origin, 3)
        assert hung <= set(released[0][1]["ids"])
        work.cut.set()
        # These run in the origins that the second has given back, too.
        work.enqueue(first, 100)
        work.await_end()
    repeated = [
        job
        for job, runs in work.starts.items()
        if len(runs) > 1 and job not in work.failing
    ]
    assert len(repeated) >= 3, "what was cut off has run again"
    assert len(work.starts) == 203
    work.check(effects=200, ran=ran)


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("I7")
def test_lost_connections_and_errors_of_our_own_spend_no_attempt(work):
    app = work.make("first")
    with heard("job.ran") as ran, running(app, "executor"):
        work.enqueue(app, 100)
        wait_for(lambda: len(work.starts) > 20, what="some have run")
        work.enqueue(app, 100)
        for _ in range(3):
            work.cut_connections()
        work.await_end()
    assert len(work.starts) == 200
    work.check(effects=200, ran=ran)
