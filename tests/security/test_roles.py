"""Each kind of role does its work with the rights of `jobs-lib grants`, and no more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from uuid import uuid4

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import create_async_engine

from jobs_lib.cli.main import cli
from jobs_lib.errors import OperatingError
from jobs_lib.operating import (
    apply_grants,
    check,
    explain,
    list_grants,
    list_holds,
    list_jobs,
    list_owners,
    list_pauses,
    list_waiting,
    show_job,
)
from jobs_lib.operating.listing import STATES
from jobs_lib.outbox.capture import capture_changes
from jobs_lib.postgres.database import Database
from jobs_lib.postgres.migrate import migrate
from jobs_lib.postgres.revisions import known_versions
from jobs_lib.settings import default_settings, load_settings
from tests.support.apps import count, heard, make_app, running
from tests.support.engines import sqlalchemy_url
from tests.support.records import read_topic
from tests.support.releases import NextRelease

if TYPE_CHECKING:
    from jobs_lib import Job
    from jobs_lib.operating.grants import Kind

DENIED = psycopg.errors.InsufficientPrivilege


@pytest.fixture
def make_role(postgres_server):
    """`make_role(url, kind=None)` returns the URL of a new role with these rights."""
    made: list[tuple[str, str]] = []

    def make(url: str, kind: Kind | None = None, name: str | None = None) -> str:
        role = name or f"{kind or 'no'}_{uuid4().hex[:8]}"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"create role {role} login password '{role}'")
        made.append((url, role))
        if kind is not None:
            apply_grants(Database(url), kind, role)
        as_role = make_url(url).set(username=role, password=role)
        return as_role.render_as_string(hide_password=False)

    yield make
    for url, role in made:
        drop_role(url, role)


def drop_role(url, role):
    """Drop a role and all that it owns in this database."""
    with psycopg.connect(url, autocommit=True) as connection:
        if connection.execute(
            "select from pg_roles where rolname = %s", (role,)
        ).rowcount:
            connection.execute(f"reassign owned by {role} to current_user")
            connection.execute(f"drop owned by {role}")
            connection.execute(f"drop role {role}")


def role_of(url):
    return str(make_url(url).username)


@pytest.mark.guarantee("FS10", "O8")
@pytest.mark.parametrize("level", [None, psycopg.IsolationLevel.REPEATABLE_READ])
def test_a_role_that_enqueues_does_so_in_every_way(
    database_url, make_role, admin, level
):
    url = make_role(database_url, "enqueue")
    app = make_app(url)
    topic = app.topic("states", value=dict)

    @app.job(group="group")
    def work(job: Job, group: str) -> None:
        """Do nothing."""

    with psycopg.connect(url) as connection:
        connection.isolation_level = level
        work.enqueue(connection, group="a")
        once = work.options(unique="u")
        first = once.enqueue(connection, group="a")
        assert once.enqueue(connection, group="a") == first
        work.options(priority="high", ordered=False).enqueue(connection, group="b")
        many = [{"group": f"g{n}"} for n in range(100)]
        work.enqueue_many(connection, many[:2])
        work.enqueue_many(connection, many)
        topic.send(connection, key="k", value={"a": 1}, version=1)
        topic.tombstone(connection, key="k")
        connection.execute("select jobs_lib.enqueue('work', \"group\" => 'c')")
        connection.execute(
            "select jobs_lib.enqueue('work', \"group\" => 'c', unique_key => 'v')"
        )
        connection.execute("select jobs_lib.send('states', 'k', '{}')")
        connection.execute("select jobs_lib.send('states', null, '{}')")
        connection.execute("select jobs_lib.send_current('states', 'k', 'things')")
        connection.execute("select jobs_lib.send_current('states', 'k', 'things', 2)")
        assert topic.send_many(connection, [("k", {"a": 1}, 2), ("l", {}, 1)]) == 2
        # There are so many keys that their shards are locked instead.
        topic.send_many(connection, ((f"k{n}", {}, 1) for n in range(100)))
    # Without COPY the rows are inserted.
    engine = create_engine(sqlalchemy_url(url).set(drivername="postgresql+psycopg2"))
    with engine.begin() as other:
        work.enqueue_many(other, many)
    engine.dispose()
    with app.transaction() as connection:
        work.enqueue(connection, group="d")
        topic.send(connection, key="m", value={}, version=1)

    async def enqueue_asynchronously() -> None:
        async with app.transaction() as connection:
            await work.enqueue(connection, group="e")
            await topic.send_many(connection, [("m", {}, 2)])
        asynchronous = sqlalchemy_url(url).set(drivername="postgresql+asyncpg")
        engine = create_async_engine(asynchronous)
        async with engine.begin() as other:
            await work.enqueue(other, group="f")
            await work.enqueue_many(other, many)
        await engine.dispose()
        await app.aclose()

    asyncio.run(enqueue_asynchronously())
    app.close()
    assert count(admin, "jobs") == 310
    assert count(admin, "outbox") == 110


@pytest.mark.guarantee("FS10", "FS14")
@pytest.mark.parametrize(
    "statement",
    [
        "select payload from jobs_lib.jobs",
        "select headers from jobs_lib.jobs",
        "select * from jobs_lib.job_states",
        "select value from jobs_lib.outbox",
        (
            "insert into jobs_lib.jobs (origin, type, payload)"
            " values ('local/1', 't', '{}') returning payload"
        ),
        (
            "insert into jobs_lib.jobs (origin, type, payload, unique_key)"
            " values ('local/1', 't', '{}', 'u') on conflict (type, unique_key)"
            " where unique_key is not null do update set payload = excluded.payload"
        ),
        (
            "insert into jobs_lib.jobs (id, origin, type, payload)"
            " values (1, 'local/1', 't', '{}')"
        ),
        "update jobs_lib.jobs set payload = '{}'",
        "delete from jobs_lib.jobs",
        "delete from jobs_lib.outbox",
        "update jobs_lib.topics set partitions = 1",
        "update jobs_lib.installation set environment = 'live'",
        "select payload from jobs_lib.discarded",
        "select * from jobs_lib.history",
        "insert into jobs_lib.grantees values (current_user, 'service')",
        "select jobs_lib.make_history(current_date + 3, 1)",
        "select jobs_lib.empty_history('2020-01-01')",
        "select jobs_lib.drop_history('2020-01-01')",
        "create table jobs_lib.mine (id int)",
        (
            "create trigger mine before insert on jobs_lib.jobs for each row"
            " execute function jobs_lib.capture_change('t', 'e', 'id')"
        ),
    ],
)
def test_a_role_that_enqueues_can_do_no_more(database_url, make_role, statement):
    with (
        psycopg.connect(make_role(database_url, "enqueue")) as connection,
        pytest.raises(DENIED),
    ):
        connection.execute(statement)


def test_a_role_that_enqueues_captures_changes_of_its_own_tables(
    database_url, make_role, admin
):
    url = make_role(database_url, "enqueue")
    role = role_of(url)
    admin.execute(f"create schema {role} authorization {role}")
    table = f"{role}.things"
    with psycopg.connect(url) as connection:
        connection.execute(f"create table {table} (id text primary key)")
        capture_changes(connection, table, topic="things", key="id")
        connection.execute(f"insert into {table} values ('a')")
    assert count(admin, "outbox") == 1


@pytest.mark.guarantee("FS10", "O8", "FS14")
def test_a_role_that_answers_asks_and_keeps_entities_and_can_do_no_more(
    database_url, make_role, admin
):
    url = make_role(database_url, "answer")
    admin.execute("create table item_rm (id int primary key, version bigint)")
    admin.execute("insert into item_rm values (1, 5)")
    admin.execute(f"grant select on item_rm to {role_of(url)}")
    app = make_app(url)
    app.read_model("a", table="item_rm", key="id", group="g")(lambda record: {})
    side = app.read_model("b", table="b_rm", key="id", group="g", versions="side")
    side(lambda record: {})
    for table, reached in (("item_rm", True), ("b_rm", False)):
        answers = app.answers(table)
        answers.valid_since(app)
        answers.wait_for(app, key="1", version=1, timeout=0)
        # The second put removes what the first one has kept, where it is reached.
        for key in "12":
            assert answers.put(app, key=key, version=5, entity={})
        kept = ["2"] if reached else ["1", "2"]
        assert [state.key for state in answers.newer(app)] == kept
    app.close()
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in (
            "select id from jobs_lib.jobs",
            "select jobs_lib.enqueue('work')",
            "insert into jobs_lib.outbox (shard, topic) values (0, 't')",
            "update jobs_lib.offsets set next_offset = 1",
            "select failure from jobs_lib.offsets",
            "delete from jobs_lib.model_keys",
            "insert into item_rm values (2)",
        ):
            with pytest.raises(DENIED):
                connection.execute(statement)
    for kind in ("read", "enqueue"):
        with (
            psycopg.connect(make_role(database_url, kind)) as connection,
            pytest.raises(DENIED),
        ):
            connection.execute("select value from jobs_lib.answers")


@pytest.mark.guarantee("FS10", "O8")
def test_a_service_runs_with_its_own_rights(
    database_url, make_role, admin, topic, bootstrap_servers, wait_for
):
    url = make_role(database_url, "service")
    app = make_app(
        url, kafka_bootstrap_servers=bootstrap_servers, home=topic(2), history_days=2
    )
    sent = app.topic(topic(), value=int)
    ran: list[int] = []

    @app.job(group=lambda n: f"g{n % 7}")
    def work(job: Job, n: int) -> None:
        if job.attempt == 1 and n == 1:
            raise ValueError("once")
        with job.transaction() as connection:
            sent.send(connection, key=str(n), value=n)
        ran.append(n)

    # A broker that has just started refuses relays for a moment.
    with heard("loop.failed") as failures, running(app, "executor", "relay"):
        with psycopg.connect(url) as connection:
            work.enqueue_many(connection, [{"n": n} for n in range(20)])
        wait_for(lambda: len(ran) == 20, timeout=60, what="all ran")
        wait_for(
            lambda: len(read_topic(bootstrap_servers, sent.name)) == 20,
            timeout=60,
            what="all are sent",
        )
        wait_for(
            lambda: (
                admin.execute(
                    "select to_regclass('jobs_lib.history_'"
                    " || to_char(now() at time zone 'UTC' + '2 days', 'YYYYMMDD'))"
                ).fetchone()
                != (None,)
            ),
            what="the history's days are made",
        )
    assert "permission denied" not in str(failures)
    found = check(Database(url), load_settings())
    assert next(one for one in found if one.check == "privileges").level == "ok"


@pytest.mark.guarantee("FS10")
@pytest.mark.parametrize(
    "statement",
    [
        "update jobs_lib.installation set environment = 'live'",
        "update jobs_lib.jobs_lib_version set version_num = '0001_installation'",
        "delete from jobs_lib.touched",
        "delete from jobs_lib.grantees",
        "truncate jobs_lib.jobs",
        "drop table jobs_lib.jobs",
        "create table jobs_lib.mine (id int)",
        (
            "create trigger mine before truncate on jobs_lib.outbox"
            " execute function jobs_lib.note_touch()"
        ),
    ],
)
def test_a_service_cannot_change_tables_that_migrations_write(
    database_url, make_role, statement
):
    with (
        psycopg.connect(make_role(database_url, "service")) as connection,
        pytest.raises(DENIED),
    ):
        connection.execute(statement)


@pytest.mark.guarantee("FS10", "O8")
def test_a_reader_sees_everything_except_payloads_headers_and_values(
    database_url, make_role, admin
):
    app = make_app(database_url)

    @app.job(group="group")
    def work(job: Job, group: str) -> None:
        """Do nothing."""

    with psycopg.connect(database_url) as connection:
        job = work.enqueue(connection, group="a")
        app.topic("states").send(connection, key="k", value=1)
    url = make_role(database_url, "read")
    database, settings = Database(url), load_settings()
    for state in (None, *STATES):
        list_jobs(database, state=state)
    assert [one.id for one in list_jobs(database)] == [job]
    assert explain(database, job).reasons
    assert [one.topic for one in list_waiting(database)] == ["states"]
    assert list_holds(database) == []
    assert list_pauses(database) == []
    list_owners(database, settings)
    assert "could not be checked" not in str(check(database, settings))
    with pytest.raises(OperatingError, match=r"may not do this .*nothing was changed"):
        show_job(database, job)
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in (
            "select payload from jobs_lib.jobs",
            "select headers from jobs_lib.job_states",
            "select value from jobs_lib.outbox",
            "select digest from jobs_lib.requests",
            "insert into jobs_lib.pauses values ('type', 'work')",
            "select jobs_lib.lift_hold('t', 'k', 1), 1 from jobs_lib.jobs for update",
            "select jobs_lib.enqueue('work')",
            "select jobs_lib.make_history(current_date, 1)",
        ):
            with pytest.raises(DENIED):
                connection.execute(statement)


@pytest.mark.guarantee("FS10", "O8")
def test_a_role_that_migrates_needs_a_schema_of_its_own_only(
    empty_url, make_role, tmp_path
):
    url = make_role(empty_url, "migrate")
    before = known_versions()[-1]
    assert migrate(url) == before
    with psycopg.connect(empty_url) as connection:
        owners = connection.execute(
            "select distinct tableowner from pg_tables where schemaname = 'jobs_lib'"
        ).fetchall()
    assert owners == [(role_of(url),)]
    # As the owner of everything, it can give rights to others.
    enqueuer = make_role(empty_url)
    apply_grants(Database(url), "enqueue", role_of(enqueuer))
    with psycopg.connect(enqueuer) as connection:
        connection.execute("select jobs_lib.enqueue('work')")


@pytest.mark.guarantee("FS10")
def test_a_service_role_finds_that_there_is_nothing_to_migrate(database_url, make_role):
    service = make_role(database_url, "service")
    settings = load_settings(database_url=service)
    migrate(database_url, settings=settings)
    assert migrate(service, settings=settings) == known_versions()[-1]
    renamed = load_settings(database_url=service, environment="pr-1")
    with pytest.raises(ProgrammingError, match="permission denied"):
        migrate(service, settings=renamed)


@pytest.mark.guarantee("FS10", "O7")
def test_a_migrating_role_takes_over_the_objects_of_a_superuser(
    database_url, make_role, tmp_path
):
    services = make_role(database_url, "service")
    url = make_role(database_url, "migrate")
    assert list_grants(Database(url), "migrate", role_of(url)) == []
    changed = "alter table jobs add column of_next_release int; create table newer ()"
    with NextRelease(tmp_path, [changed]).installed():
        migrate(url)
    with psycopg.connect(services) as connection:
        connection.execute("select jobs_lib.make_history(current_date + 9, 1)")
        connection.execute("select * from jobs_lib.newer")


@pytest.mark.guarantee("FS10", "O8")
def test_objects_of_a_later_migration_are_granted_with_it(
    database_url, make_role, tmp_path
):
    service = make_role(database_url, "service")
    reader = make_role(database_url, "read")
    enqueuer = make_role(database_url, "enqueue")
    answerer = make_role(database_url, "answer")
    stranger = make_role(database_url)
    added = """
    create table newer (id bigint generated always as identity, payload jsonb);
    alter table offsets drop column failed_offset;
    alter table offsets add column failed_offset bigint;
    create function of_next_release() returns bigint language sql security definer
    as $$ select count(*) from newer $$;
    """
    with NextRelease(tmp_path, [added]).installed():
        migrate(database_url)
    tries = {
        "insert into jobs_lib.newer (payload) values ('{}') returning payload": "s",
        "select jobs_lib.of_next_release()": "s",
        "select id from jobs_lib.newer": "sr",
        "select payload from jobs_lib.newer": "s",
        "select jobs_lib.enqueue('work')": "se",
        "select failed_offset from jobs_lib.offsets": "sra",
    }
    who = {"s": service, "r": reader, "e": enqueuer, "a": answerer, "x": stranger}
    for statement, allowed in tries.items():
        for letter, url in who.items():
            with psycopg.connect(url, autocommit=True) as connection:
                if letter in allowed:
                    connection.execute(statement)
                    continue
                with pytest.raises(DENIED):
                    connection.execute(statement)


@pytest.mark.guarantee("FS14")
def test_a_new_role_of_an_old_name_inherits_nothing(
    database_url, make_role, tmp_path, admin
):
    name = f"again_{uuid4().hex[:8]}"
    make_role(database_url, "service", name)
    drop_role(database_url, name)
    url = make_role(database_url, None, name)
    with NextRelease(tmp_path, ["create table newer ()"]).installed():
        migrate(database_url)
    with psycopg.connect(url) as connection, pytest.raises(DENIED):
        connection.execute("select * from jobs_lib.newer")


@pytest.mark.guarantee("FS14")
@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "by the command"])
def test_a_service_role_that_was_made_an_enqueuer_gets_no_service_rights_back(
    database_url, make_role, tmp_path, admin, by_hand
):
    url = make_role(database_url, "service")
    role = role_of(url)
    if by_hand:
        for what in ("tables", "sequences", "routines"):
            admin.execute(f"revoke all on all {what} in schema jobs_lib from {role}")
    else:
        apply_grants(Database(database_url), "none", role)
    apply_grants(Database(database_url), "enqueue", role)
    assert_no_service(database_url, url, tmp_path)


@pytest.mark.guarantee("FS14")
@pytest.mark.parametrize("kind", ["enqueue", "answer", "read"])
def test_a_new_role_of_a_services_name_is_no_service(
    database_url, make_role, tmp_path, kind
):
    name = f"again_{uuid4().hex[:8]}"
    make_role(database_url, "service", name)
    drop_role(database_url, name)
    url = make_role(database_url, kind, name)
    assert_no_service(database_url, url, tmp_path, enqueues=kind == "enqueue")


def assert_no_service(database_url, url, tmp_path, *, enqueues=True):
    """Assert that a migration gives the role no rights of a service, nor advises it."""
    added = "create table newer (payload jsonb)"
    with NextRelease(tmp_path, [added]).installed():
        migrate(database_url)
    with psycopg.connect(url, autocommit=True) as connection:
        if enqueues:
            connection.execute("select jobs_lib.enqueue('work')")
        for denied in (
            "select * from jobs_lib.newer",
            "select payload from jobs_lib.jobs",
            "delete from jobs_lib.jobs",
            "select jobs_lib.make_history(current_date + 3, 1)",
        ):
            with pytest.raises(DENIED):
                connection.execute(denied)
    found = check(Database(database_url), load_settings(), role=role_of(url))
    assert next(one for one in found if one.check == "privileges").level == "ok"


@pytest.mark.guarantee("FS14")
def test_a_role_that_is_granted_nothing_any_more_has_nothing(
    database_url, make_role, admin
):
    url = make_role(database_url, "service")
    role = role_of(url)
    apply_grants(Database(database_url), "read", role)
    apply_grants(Database(database_url), "none", role)
    assert count(admin, "grantees") == 0
    held = admin.execute(
        "select format('%%s %%s', privilege_type, 'schema') from pg_namespace,"
        " aclexplode(nspacl) where grantee = %(role)s::regrole"
        " union all select format('%%s %%s', privilege_type, relname) from pg_class,"
        " aclexplode(relacl) where grantee = %(role)s::regrole"
        " union all select format('%%s %%s', privilege_type, attname)"
        " from pg_attribute, aclexplode(attacl) where grantee = %(role)s::regrole"
        " union all select format('%%s %%s', privilege_type, proname) from pg_proc,"
        " aclexplode(proacl) where grantee = %(role)s::regrole",
        {"role": role},
    ).fetchall()
    assert held == []


def test_the_owner_of_the_tables_keeps_its_rights(database_url, make_role):
    owner = role_of(make_role(database_url, "migrate"))
    with pytest.raises(OperatingError, match="owns the tables"):
        apply_grants(Database(database_url), "none", owner)


def test_the_command_prints_what_it_would_apply(database_url, make_role, monkeypatch):
    role = 'we"ird: %s'
    quoted = sql.Identifier(role)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(sql.SQL("create role {}").format(quoted))
        try:
            monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
            default_settings.cache_clear()
            run = CliRunner().invoke
            printed = run(cli, ["grants", "enqueue", role])
            assert printed.exit_code == 0
            granted = run(cli, ["grants", "service", role, "--apply"])
            assert granted.output == f"granted: service to {role}\n"
            connection.execute(printed.output.encode())
            kinds = connection.execute(
                "select kind from jobs_lib.grantees where role = %s order by 1", (role,)
            ).fetchall()
            assert kinds == [("enqueue",), ("service",)]
            refused = run(cli, ["grants", "read", "nobody_of_this_name"])
            assert isinstance(refused.exception, OperatingError)
            assert "there is no role 'nobody_of_this_name'" in str(refused.exception)
        finally:
            connection.execute(sql.SQL("drop owned by {}").format(quoted))
            connection.execute(sql.SQL("drop role {}").format(quoted))


def test_grants_by_a_role_that_may_not_grant_fail_and_change_nothing(
    database_url, make_role, admin
):
    url, other = make_role(database_url, "service"), make_role(database_url)
    with pytest.raises(OperatingError, match=r"may not .*nothing was changed"):
        apply_grants(Database(url), "read", role_of(other))
    admin.execute(
        f"grant select on all tables in schema jobs_lib to {role_of(url)}"
        " with grant option"
    )
    admin.execute(f"grant usage on schema jobs_lib to {role_of(url)} with grant option")
    with pytest.raises(OperatingError, match=r"may not .*nothing was changed"):
        apply_grants(Database(url), "read", role_of(other))
    found = admin.execute(
        "select has_schema_privilege(%s, 'jobs_lib', 'usage')", (role_of(other),)
    ).fetchone()
    assert found == (False,)


def test_the_check_finds_a_missing_right_of_a_granted_role(
    database_url, make_role, admin
):
    url = make_role(database_url, "enqueue")
    database = Database(database_url)

    def privileges():
        found = check(database, load_settings(), role=role_of(url))
        return next(one for one in found if one.check == "privileges")

    assert privileges().level == "ok"
    admin.execute(f"revoke insert on jobs_lib.jobs from {role_of(url)}")
    assert "lacks insert on jobs" in privileges().what
