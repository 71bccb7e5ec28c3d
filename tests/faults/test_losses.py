"""A job that repeatedly loses its connection pays for it, unless its server is away."""

from __future__ import annotations

import psycopg
import pytest

from jobs_lib import exponential
from tests.faults.helpers import attempts, count, effects
from tests.support.apps import HOME, executing, make_app
from tests.support.proxy import Proxy

RETRY = exponential(first=0.01, cap=0.01, max_attempts=3)
ADD = "insert into effects values (%s, %s)"
KILL = "select pg_terminate_backend(pg_backend_pid())"
KILL_AT_COMMIT = """
create function end_backend() returns trigger language plpgsql as $$ begin
    perform pg_terminate_backend(pg_backend_pid());
    return null;
end $$;
create constraint trigger ended after insert on effects deferrable initially deferred
    for each row when (new.n = 0) execute function end_backend();
"""


@pytest.mark.guarantee("FJ20", "FJ1")
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("fault", ["killed", "idle", "killed at commit"])
def test_a_job_that_loses_its_connection_again_and_again_is_discarded(
    url, app, admin, connect, wait_for, fault, kind
):
    idle = "300ms" if fault == "idle" else "0"
    admin.execute(KILL_AT_COMMIT)
    seen: list[int] = []
    limit = f"set local idle_in_transaction_session_timeout = '{idle}'"
    question = KILL if fault == "killed" else "select 1"

    def await_end(connection: psycopg.Connection | psycopg.AsyncConnection) -> None:
        """Let the server end an idle session, however late it does so."""
        found = "select from pg_stat_activity where pid = %s"
        place = (connection.info.backend_pid,)
        if fault == "idle":
            wait_for(
                lambda: not admin.execute(found, place).rowcount,
                timeout=30,
                what="the server has ended the session",
            )

    def run(job, n: int) -> None:
        with job.transaction() as connection:
            connection.execute(ADD, (n, job.id))
            if n == 0:
                seen.append(job.attempt)
                connection.execute(limit)
                await_end(connection)
                connection.execute(question)

    async def run_async(job, n: int) -> None:
        async with job.transaction() as connection:
            await connection.execute(ADD, (n, job.id))
            if n == 0:
                seen.append(job.attempt)
                await connection.execute(limit)
                await_end(connection)
                await connection.execute(question)

    work = app.job(name="work", group=lambda n: "g", retry=RETRY)(
        run if kind == "plain" else run_async
    )
    with connect() as connection:
        work.enqueue_many(connection, [{"n": 0}, {"n": 1}])
    with executing(app, HOME, workers=2):
        wait_for(lambda: count(url) == 0, timeout=30, what="both have ended")
    # The cause of the first loss is unknown.
    assert seen == [1, 1, 2, 3]
    assert effects(url) == [1]
    assert attempts(url) == {("discarded", 3), ("completed", 1)}
    (errors,) = admin.execute("select errors from jobs_lib.discarded").fetchone()
    assert "4 times in a row" in errors[-1]["error"]


@pytest.mark.guarantee("J20", "FP11")
@pytest.mark.expects("loop.failed")
def test_a_job_that_is_cut_off_together_with_its_process_pays_no_attempt(
    url, connect, wait_for
):
    with Proxy.before(url) as proxy:
        app = make_app(proxy.url(url))
        seen: list[int] = []

        @app.job(retry=RETRY)
        def work(job) -> None:
            with job.transaction() as connection:
                seen.append(job.attempt)
                if len(seen) <= 3:
                    proxy.reset()
                connection.execute(ADD, (1, job.id))

        with connect() as connection:
            work.enqueue(connection)
        with executing(app, HOME):
            wait_for(lambda: count(url) == 0, timeout=40, what="it has run")
    assert seen == [1, 1, 1, 1]
    assert attempts(url) == {("completed", 1)}


@pytest.mark.guarantee("J20", "I7")
@pytest.mark.expects("loop.failed")
def test_a_job_pays_no_attempt_if_its_session_ends_before_those_of_its_process(
    url, app, admin, connect, wait_for
):
    # PostgreSQL ends sessions one after the other. So the process may still write that
    # the job has lost its connection, before it loses its own.
    seen: list[int] = []
    end = (
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and application_name like %s"
    )

    @app.job(retry=RETRY)
    def work(job) -> None:
        with job.transaction() as connection:
            seen.append(job.attempt)
            if len(seen) == 1:
                admin.execute(end, ["jobs_lib %"])
            elif len(seen) == 2:
                admin.execute(end, ["jobs_lib handlers %"])
            connection.execute(ADD, (1, job.id))

    with connect() as connection:
        work.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: count(url) == 0, timeout=40, what="it has run")
    assert seen == [1, 1, 1]
    assert attempts(url) == {("completed", 1)}


@pytest.mark.guarantee("J20")
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_loss_that_the_driver_has_not_seen_yet_is_a_loss(
    url, app, connect, wait_for, kind
):
    seen: list[int] = []

    def lose(connection: psycopg.Connection | psycopg.AsyncConnection) -> None:
        # The driver leaves it so if the socket is closed before it can read that.
        connection.pgconn.send_query(b"select 1")
        raise psycopg.OperationalError("connection socket closed")

    def run(job) -> None:
        with job.transaction() as connection:
            seen.append(job.attempt)
            if len(seen) == 1:
                lose(connection)

    async def run_async(job) -> None:
        async with job.transaction() as connection:
            seen.append(job.attempt)
            if len(seen) == 1:
                lose(connection)

    work = app.job(retry=RETRY)(run if kind == "plain" else run_async)
    with connect() as connection:
        work.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: count(url) == 0, timeout=30, what="it has run")
    assert seen == [1, 1]
    assert attempts(url) == {("completed", 1)}
