"""Errors of the server under the library's own statements cost no attempt."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

from jobs_lib import exponential
from tests.faults.helpers import attempts, count, effects, enqueue
from tests.support.apps import executing

STATES = ["55P03", "40P01", "40001", "57014", "25P03", "57P01", "53100", "53200"]

# Raises an error three times, at the deletion of a job: that is a completion, by the
# executor or in a job's own transaction.
FAIL = """
create sequence failures;
create function fail() returns trigger language plpgsql as $$
begin
    if nextval('public.failures') <= 3 then
        raise exception 'made to fail' using errcode = '{}';
    end if;
    return old;
end $$;
create trigger fail before delete on jobs_lib.jobs for each row execute function fail();
"""


@pytest.fixture
def handlers(app):
    """Two types: one that leaves its completion to the executor, and one that not."""

    @app.job(retry=exponential(first=0.01, cap=0.01))
    def quick(job, n: int) -> None: ...

    @app.job(retry=exponential(first=0.01, cap=0.01))
    def add(job, n: int) -> None:
        with job.transaction() as connection:
            connection.execute("insert into effects values (%s, %s)", (n, job.id))

    @app.job(retry=exponential(first=0.01, cap=0.01))
    async def aadd(job, n: int) -> None:
        async with job.transaction() as connection:
            await connection.execute("insert into effects values (%s, %s)", (n, job.id))

    return app


@pytest.mark.guarantee("FP11")
@pytest.mark.parametrize(
    ("name", "state"),
    [
        *((name, state) for name in ("quick", "add") for state in STATES),
        # The same rule on the event loop.
        *(("aadd", state) for state in ("40001", "25P03", "57P01")),
    ],
)
def test_an_error_under_our_own_statement_is_retried_without_an_attempt(
    url, admin, handlers, wait_for, state, name
):
    admin.execute(FAIL.format(state))
    enqueue(url, name, 2)
    origins = [f"local/{n}" for n in range(16)]
    with executing(handlers, origins):
        wait_for(lambda: count(url) == 0, what="all have run")
    assert admin.execute("select last_value > 3 from failures").fetchone() == (True,)
    assert attempts(url) == {("completed", 1)}
    assert effects(url) == ([] if name == "quick" else [0, 1])


def test_the_handler_pays_for_its_own_statements(url, handlers, admin, wait_for):
    admin.execute(FAIL.format("40001").replace("jobs_lib.jobs", "effects"))
    admin.execute("drop trigger fail on effects")
    admin.execute(
        "create trigger fail before insert on effects for each row"
        " execute function fail()"
    )
    enqueue(url, "add", 1)
    with executing(handlers, [f"local/{n}" for n in range(16)]):
        wait_for(lambda: count(url) == 0, what="it has run")
    assert attempts(url) == {("completed", 4)}


@pytest.mark.guarantee("FP11")
@pytest.mark.parametrize("name", ["add", "aadd"])
def test_a_rollback_that_fails_does_not_hide_why(url, app, admin, wait_for, name):
    killed = []

    def lose(connection) -> None:
        killed.append(connection.info.backend_pid)
        admin.execute("select pg_terminate_backend(%s, 10000)", killed)

    @app.job(retry=exponential(first=0.01, cap=0.01))
    def add(job, n: int) -> None:
        with job.transaction() as connection:
            if not killed:
                connection.execute("set transaction read only")
            try:
                connection.execute("insert into effects values (%s, %s)", (n, job.id))
            except psycopg.errors.ReadOnlySqlTransaction:
                lose(connection)
                raise

    @app.job(retry=exponential(first=0.01, cap=0.01))
    async def aadd(job, n: int) -> None:
        async with job.transaction() as connection:
            if not killed:
                await connection.execute("set transaction read only")
            try:
                await connection.execute(
                    "insert into effects values (%s, %s)", (n, job.id)
                )
            except psycopg.errors.ReadOnlySqlTransaction:
                lose(connection)
                raise

    enqueue(url, name, 1)
    with executing(app, [f"local/{n}" for n in range(16)]):
        wait_for(lambda: count(url) == 0, what="it has run")
    assert killed
    assert attempts(url) == {("completed", 1)}


@pytest.mark.parametrize("fault", ["closed", "read-only"])
def test_a_server_that_refuses_is_waited_for(
    url, postgres_server, start_worker, wait_for, fault
):
    worker = start_worker(url)
    enqueue(url, "add", 300)
    wait_for(lambda: len(effects(url)) > 20, what="some have run")
    with psycopg.connect(postgres_server.url, autocommit=True) as admin:
        name = sql.Identifier(str(psycopg.conninfo.conninfo_to_dict(url)["dbname"]))

        def alter(how: str) -> None:
            admin.execute(sql.SQL("alter database {} ").format(name) + sql.SQL(how))
            admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name like 'jobs_lib %'"
            )

        refuse, allow = REFUSALS[fault]
        alter(refuse)
        wait_for(
            lambda: "loop.failed loop=executor" in worker.output,
            what=lambda: f"it has noticed\n{worker.output}",
        )
        assert worker.running
        alter(allow)
    wait_for(
        lambda: count(url) == 0,
        timeout=30,
        what=lambda: f"all have run\n{worker.output}",
    )
    assert worker.running
    assert effects(url) == [*range(300)]
    assert attempts(url) == {("completed", 1)}


REFUSALS = {
    # As with no connection left: a superuser could not be counted out.
    "closed": ("allow_connections false", "allow_connections true"),
    "read-only": (
        "set default_transaction_read_only = on",
        "reset default_transaction_read_only",
    ),
}
