"""The library works where the default isolation level is stricter."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from jobs_lib import reexport
from jobs_lib.errors import ConfigurationError
from jobs_lib.operating import cancel, pause, resume
from jobs_lib.operating.home_topic import repartition
from jobs_lib.partitioner import choose_origin
from jobs_lib.postgres.database import Database
from jobs_lib.postgres.migrate import write_sql
from jobs_lib.testing import make_record
from jobs_lib.testing.jobs import Jobs
from tests.operating.helpers import add_claim, add_job, add_owner
from tests.support.apps import HOME, count, executing, heard, make_app, running

if TYPE_CHECKING:
    from jobs_lib import Job

SHOW = "show transaction_isolation"
REFUSE = """
create function public.refuse_strict() returns trigger language plpgsql as $function$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception '% of % under %', tg_op, tg_table_name,
            current_setting('transaction_isolation');
    end if;
    return null;
end
$function$;

do $do$
declare
    one regclass;
begin
    for one in
        select c.oid from pg_class c
        where c.relnamespace = 'jobs_lib'::regnamespace and c.relkind in ('r', 'p')
            and not c.relispartition
    loop
        execute format(
            'create trigger refuse_strict before insert or update or delete on %s'
            ' execute function public.refuse_strict()', one
        );
    end loop;
end
$do$;
"""


@pytest.fixture(params=["repeatable read", "serializable"])
def strict_url(request, database_url, admin) -> str:
    """The URL of a database whose transactions are stricter by default."""
    name = psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]
    admin.execute(
        f"alter database {name} set default_transaction_isolation = '{request.param}'"
    )
    with psycopg.connect(database_url) as connection:
        assert connection.execute(SHOW).fetchone() == (request.param,)
    return database_url


@pytest.fixture
def in_thread():
    """A function that runs another one in a thread, and returns its future."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


@pytest.fixture
def waits(admin, wait_for):
    """A function that waits until another session waits for a lock."""

    def waits() -> None:
        wait_for(
            lambda: admin.execute("select from pg_locks where not granted").rowcount,
            what="a session waits for a lock",
        )

    return waits


@pytest.mark.guarantee("FP22")
def test_every_transaction_of_the_library_is_read_committed(strict_url):
    database = Database(strict_url)
    app = make_app(strict_url)
    found: list[Any] = []

    async def ask_async() -> None:
        pool = database.async_pool("test", 1)
        await pool.open()
        async with pool.connection() as connection:
            found.append(await (await connection.execute(SHOW)).fetchone())
        await pool.close()
        async with app.transaction() as connection:
            found.append(await (await connection.execute(SHOW)).fetchone())
        await app.aclose()

    with database.connect("test") as session:
        found.append(session.execute(SHOW).fetchone())
        with session.transaction():
            found.append(session.execute(SHOW).fetchone())
    with database.pool("test", 1) as pool, pool.connection() as connection:
        found.append(connection.execute(SHOW).fetchone())
    with app.transaction() as connection:
        found.append(connection.execute(SHOW).fetchone())
    asyncio.run(ask_async())
    app.close()
    assert found == [("read committed",)] * 6


@pytest.mark.guarantee("FP22")
def test_a_repartition_moves_the_jobs_whose_commit_it_waited_for(
    strict_url, admin, connect, in_thread, waits
):
    app = make_app(strict_url)

    @app.job(group="group")
    def work(job: Job, group: str) -> None: ...

    groups = [f"g{n}" for n in range(40)]
    connection = connect()
    for group in groups:
        work.enqueue(connection, group=group)
    moving = in_thread(repartition, app, 12)
    waits()
    connection.commit()
    assert moving.result(timeout=30)
    rows = admin.execute('select "group", origin from jobs_lib.jobs').fetchall()
    assert dict(rows) == {g: choose_origin(g, "local", 12) for g in groups}


@pytest.mark.guarantee("FP22")
def test_a_cancel_sees_the_claim_that_it_has_waited_for(
    strict_url, admin, connect, in_thread, waits
):
    executor = connect()
    job = add_job(admin)
    owner = add_owner(admin)
    executor.execute("select from jobs_lib.origins for share")
    add_claim(executor, owner, job)
    cancelling = in_thread(cancel, Database(strict_url), [job])
    waits()
    executor.commit()
    assert cancelling.result(timeout=30) == {job: "requested"}


@pytest.mark.guarantee("FP22")
def test_jobs_run_once_and_in_order_while_owners_change(
    strict_url, admin, connect, wait_for
):
    # The first one never counts as dead, so a busy machine adds no failure.
    app = make_app(strict_url, stale_after=20.0)
    admin.execute("create table effects (place bigserial, n int)")

    @app.job(group=lambda n: f"g{n % 5}")
    def work(job: Job, n: int) -> None:
        with job.transaction() as connection:
            assert connection.execute(SHOW).fetchone() == ("read committed",)
            connection.execute("insert into effects (n) values (%s)", (n,))

    with heard("loop.failed") as failures, executing(app, HOME):
        for start in range(0, 200, 20):
            with app.transaction() as connection:
                work.enqueue_many(
                    connection, [{"n": n} for n in range(start, start + 20)]
                )
        wait_for(lambda: count(admin, "jobs") < 150, what="some have run")
        with running(app, "executor"):
            wait_for(lambda: not count(admin, "jobs"), timeout=60, what="all have run")
    app.close()
    ran = [n for (n,) in admin.execute("select n from effects order by place")]
    for group in range(5):
        assert [n for n in ran if n % 5 == group] == list(range(group, 200, 5))
    assert not failures


@pytest.mark.guarantee("FP22")
def test_a_default_that_cannot_be_changed_behind_pgbouncer_is_refused(strict_url):
    # No PgBouncer is needed here, since it passes the server's default on.
    database = Database(strict_url, pgbouncer=True)
    with pytest.raises(ConfigurationError, match="alter role ROLE set"):
        database.connect("test")


@pytest.mark.guarantee("FP22")
def test_every_part_of_a_service_writes_under_read_committed(
    strict_url, admin, connect, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    # The relay gives a busy broker half of that to answer.
    app = make_app(
        strict_url,
        home=name,
        kafka_bootstrap_servers=bootstrap_servers,
        session_timeout=60.0,
    )
    admin.execute("create table item (id text); insert into item values ('a'), ('b')")
    admin.execute(REFUSE)
    with pytest.raises(psycopg.errors.RaiseException, match="UPDATE of topics under"):
        connect().execute("update jobs_lib.topics set home = home")
    sent = app.topic(name, value=dict[str, str])
    app.entity(sent, source="item", key="id")(
        lambda _connection, keys: {key: {"from": "reexport"} for key in keys}
    )
    ran: list[str] = []

    @app.job(group="key")
    def work(job: Job, key: str) -> None:
        with job.transaction():
            ran.append(key)

    @app.consumer(name, group=f"{name}-service")
    def handle(record, connection) -> None:
        assert connection.execute(SHOW).fetchone() == ("read committed",)
        work.enqueue(connection, key=record.key)

    with running(app):
        with app.transaction() as connection:
            sent.send(connection, key="c", value={"from": "send"})
        database = app.database()
        reexport.start(database, app.entities["item"], rate=600)
        wait_for(lambda: {*ran} == {"a", "b", "c"}, timeout=60, what="all have run")
        pause(database, "type", "work")
        resume(database, "type", "work")
    app.close()


@pytest.mark.guarantee("FP22")
def test_the_test_kit_reads_what_is_committed(strict_url):
    app = make_app(strict_url)
    found: list[Any] = []

    @app.job()
    def work(job: Job) -> None:
        with job.transaction() as connection:
            found.append(connection.execute(SHOW).fetchone())

    @app.job()
    async def work_async(job: Job) -> None:
        async with job.transaction() as connection:
            found.append(await (await connection.execute(SHOW)).fetchone())

    def handle(_: Any, connection: psycopg.Connection[Any]) -> None:
        found.append(connection.execute(SHOW).fetchone())

    with Jobs(app, strict_url) as jobs:
        connection = jobs.connect()
        found.append(connection.execute(SHOW).fetchone())
        connection.rollback()
        jobs.handle(handle, make_record({}))
        with jobs.transaction() as connection:
            work.enqueue(connection)
            work_async.enqueue(connection)
        assert jobs.drain() == 2
    assert found == [("read committed",)] * 4


@pytest.mark.guarantee("FP22")
@pytest.mark.parametrize("since", [None, "0016_send"])
def test_printed_migrations_name_their_isolation(since):
    first, second = write_sql(since=since).split(";")[:2]
    assert first.strip() == "BEGIN"
    assert second.strip() == "set transaction isolation level read committed"
