"""Errors of the server in the library's own statements cost no attempt."""

from __future__ import annotations

import contextlib
import os
import socket
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from jobs_lib import exponential
from tests.faults.helpers import attempts, count, effects, enqueue
from tests.faults.small_disk import SmallDisk
from tests.support.apps import executing

STATES = ["55P03", "40P01", "40001", "57014", "25P03", "57P01", "53100", "53200"]

# Raises an error three times, when a job is deleted. That is a completion, by the
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
    """Two types: one leaves its completion to the executor, the other does not."""

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


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FP11")
@pytest.mark.parametrize(
    ("name", "state"),
    [
        *((name, state) for name in ("quick", "add") for state in STATES),
        # The same rule holds on the event loop.
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
def test_a_failed_rollback_does_not_hide_the_first_error(
    url, app, admin, wait_for, name
):
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


@pytest.mark.guarantee("FP11")
@pytest.mark.parametrize("name", ["add", "aadd"])
def test_a_driver_error_on_a_lost_connection_costs_no_attempt(url, app, wait_for, name):
    cut: list[socket.socket] = []

    def cut_once(connection) -> None:
        """Let the driver raise before the client library notices."""
        if not cut:
            cut.append(socket.socket(fileno=os.dup(connection.fileno())))
            cut[0].shutdown(socket.SHUT_RDWR)
            assert not connection.broken
            raise psycopg.OperationalError("connection socket closed")

    @app.job(retry=exponential(first=0.01, cap=0.01))
    def add(job, n: int) -> None:
        with job.transaction() as connection:
            connection.execute("insert into effects values (%s, %s)", (n, job.id))
            cut_once(connection)

    @app.job(retry=exponential(first=0.01, cap=0.01))
    async def aadd(job, n: int) -> None:
        async with job.transaction() as connection:
            await connection.execute("insert into effects values (%s, %s)", (n, job.id))
            cut_once(connection)

    enqueue(url, name, 1)
    with executing(app, [f"local/{n}" for n in range(16)]):
        wait_for(lambda: count(url) == 0, what="it has run")
    cut[0].close()
    assert effects(url) == [0]
    assert attempts(url) == {("completed", 1)}


class Refusal:
    """A server that refuses work for a while."""

    told = ""
    """The text by which the worker's log reports it."""

    def __init__(self, admin: psycopg.Connection, url: str) -> None:
        self.admin, self.url = admin, url
        name = str(psycopg.conninfo.conninfo_to_dict(url)["dbname"])
        self.database = sql.SQL("alter database {} ").format(sql.Identifier(name))

    def close(self) -> None:
        """Leave nothing behind."""

    def alter(self, how: str) -> None:
        self.admin.execute(self.database + sql.SQL(how))
        self.cut()

    def cut(self) -> None:
        """End the worker's sessions."""
        self.admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'jobs_lib %'"
        )


class Closed(Refusal):
    told = "not currently accepting connections"

    def begin(self) -> None:
        self.alter("allow_connections false")

    def end(self) -> None:
        self.alter("allow_connections true")


class ReadOnly(Refusal):
    told = " 25006 "

    def begin(self) -> None:
        self.alter("set default_transaction_read_only = on")

    def end(self) -> None:
        self.alter("reset default_transaction_read_only")


class Crowded(Refusal):
    told = "too many connections"  # no superuser: those always get in

    def begin(self) -> None:
        self.admin.execute("alter role worker connection limit 0")
        self.cut()

    def end(self) -> None:
        self.admin.execute("alter role worker connection limit -1")


class Full(Refusal):
    """The disk of the library's tables is full."""

    told = " 53100 "

    def __init__(self, admin: psycopg.Connection, url: str) -> None:
        super().__init__(admin, url)
        self.disk = SmallDisk(admin)
        self.cut()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("alter table effects set tablespace small")
            connection.execute("alter table jobs_lib.claims set tablespace small")

    def begin(self) -> None:
        self.disk.fill()

    def end(self) -> None:
        self.disk.empty()

    def close(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("drop table effects")
            connection.execute("drop schema jobs_lib cascade")
        self.disk.close()


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FP12")
@pytest.mark.parametrize("kind", [Closed, ReadOnly, Crowded, Full])
def test_an_executor_waits_for_a_server_that_refuses(
    url, postgres_server, start_worker, wait_for, kind
):
    with (
        psycopg.connect(postgres_server.url, autocommit=True) as admin,
        contextlib.closing(kind(admin, url)) as refusal,
    ):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(ROLE)
        # So many that some are left once the server refuses.
        enqueue(url, "add", 1_500)
        parts = urlsplit(url)
        there = parts.netloc.rpartition("@")[2]
        worker = start_worker(
            parts._replace(netloc=f"worker:{PASSWORD}@{there}").geturl(),
            env={"tell": "all"},
        )
        wait_for(lambda: len(effects(url)) > 20, timeout=60, what="some have run")
        refusal.begin()
        try:
            wait_for(
                lambda: any(
                    line.startswith("alarm executor ") and refusal.told in line
                    for line in worker.lines
                ),
                timeout=30,
                what=lambda: f"it has noticed and told\n{worker.output}",
            )
        finally:
            refusal.end()
        wait_for(
            lambda: count(url) == 0,
            timeout=30,
            what=lambda: f"all have run\n{worker.output}",
        )
        assert worker.running
        assert effects(url) == [*range(1_500)]
        assert attempts(url) == {("completed", 1)}
        worker.kill()


PASSWORD = "worker-of-a-test"
# All databases of the server share the role, so it may exist already.
ROLE = f"""
do $$ begin
    create role worker login password '{PASSWORD}';
exception when duplicate_object then null;
end $$;
grant usage on schema jobs_lib, public to worker;
grant all on all tables in schema jobs_lib, public to worker;
grant all on all sequences in schema jobs_lib, public to worker;
"""
