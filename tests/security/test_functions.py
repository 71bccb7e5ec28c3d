"""The tables' functions give a role with the documented rights no more rights."""

from __future__ import annotations

import contextlib
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine

from jobs_lib.postgres.migrate import migrate, upgrade
from tests.support.apps import count, make_app
from tests.support.engines import sqlalchemy_url
from tests.support.releases import NextRelease

OLD = "2020-01-01"
LOOSE = """
select p.proname from pg_proc p join pg_namespace n on n.oid = p.pronamespace
where n.nspname = %(schema)s and p.prosqlbody is null
    and ('search_path=' || quote_ident(%(schema)s) || ', pg_temp' = any (p.proconfig))
        is not true
"""
CALLABLE = """
select p.proname from pg_proc p join pg_namespace n on n.oid = p.pronamespace
cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
where n.nspname = %(schema)s and p.prosecdef and a.grantee = 0
"""
EVIL = """
create temp table loot (who text);
grant insert on loot to public;
create function pg_temp.evil() returns trigger language plpgsql as $$
begin
    insert into loot values (current_user);
    return null;
end $$;
"""


def migrate_once(url, schema):
    migrate(url, schema)


def upgrade_with_sqlalchemy(url, schema):
    engine = create_engine(sqlalchemy_url(url))
    with engine.begin() as connection:
        upgrade(connection, schema)
    engine.dispose()


@pytest.fixture
def attacker(admin, connect):
    """A session of a role with the rights of a service, and a schema of its own."""
    role = f"attacker_{uuid4().hex[:8]}"
    admin.execute(f"""
        create role {role} login password '{role}';
        create schema own authorization {role};
        grant usage on schema jobs_lib to {role};
        grant select, insert, update, delete on all tables in schema jobs_lib to {role};
        grant usage on all sequences in schema jobs_lib to {role};
        grant execute on all functions in schema jobs_lib to {role};
    """)
    session = connect(user=role, password=role, autocommit=True)
    session.execute(EVIL)
    yield session
    session.close()
    admin.execute(f"drop owned by {role} cascade")
    admin.execute(f"drop role {role}")


def shadow(session):
    """Make a temporary table for each of ours; return their names."""
    names = [
        name
        for (name,) in session.execute(
            "select tablename from pg_tables where schemaname = 'jobs_lib'"
        ).fetchall()
    ]
    for name in names:
        session.execute(
            sql.SQL("create temp table {0} (like jobs_lib.{0} including all)").format(
                sql.Identifier(name)
            )
        )
    return names


def set_traps(session, names):
    """Make every write to a temporary table run a function of the session."""
    for name in names:
        for event in ("insert", "update", "delete", "truncate"):
            session.execute(
                sql.SQL(
                    "create trigger {0} before {1} on pg_temp.{2} for each statement"
                    " execute function pg_temp.evil()"
                ).format(sql.Identifier(event), sql.SQL(event), sql.Identifier(name))
            )
        session.execute(f"grant all on pg_temp.{name} to public")


@pytest.mark.guarantee("FS14")
@pytest.mark.parametrize("schema", ["jobs_lib", 'we"ird; Ünï'])
@pytest.mark.parametrize("install", [migrate_once, upgrade_with_sqlalchemy])
def test_no_function_looks_into_temporary_tables_first(empty_url, install, schema):
    install(empty_url, schema)
    with psycopg.connect(empty_url) as connection:
        assert connection.execute(LOOSE, {"schema": schema}).fetchall() == []
        assert connection.execute(CALLABLE, {"schema": schema}).fetchall() == []


@pytest.mark.guarantee("FS14")
def test_a_careless_later_revision_leaves_every_function_safe(empty_url, tmp_path):
    migrate(empty_url)
    careless = """
    create or replace function note_touch() returns trigger
    language plpgsql security definer as $$ begin return null; end $$;
    create function of_next_release() returns int
    language sql security definer set search_path from current as $$ select 1 $$;
    """
    with NextRelease(tmp_path, [careless]).installed():
        migrate(empty_url)
    with psycopg.connect(empty_url) as connection:
        found = connection.execute(
            "select count(*) from pg_proc where proname = 'of_next_release'"
        ).fetchone()
        assert found == (1,)
        assert connection.execute(LOOSE, {"schema": "jobs_lib"}).fetchall() == []
        assert connection.execute(CALLABLE, {"schema": "jobs_lib"}).fetchall() == []


@pytest.mark.guarantee("FS14")
@pytest.mark.parametrize(
    "call",
    [
        "delete from jobs_lib.outbox where false",
        "select jobs_lib.make_history(current_date + 3, 1000)",
        f"select jobs_lib.empty_history('{OLD}')",
        f"select jobs_lib.drop_history('{OLD}')",
    ],
    ids=["note_touch", "make_history", "empty_history", "drop_history"],
)
def test_no_trap_of_a_session_runs_with_the_rights_of_the_owner(attacker, call):
    names = shadow(attacker)
    gone = f"history_{OLD.replace('-', '')}"
    attacker.execute(f"create temp table {gone} (like jobs_lib.history)")
    set_traps(attacker, [*names, gone])
    # These match better than PostgreSQL's own functions, in a path of the session.
    attacker.execute("""
        create function own.to_char(date, text) returns text language plpgsql as
        $$ begin insert into loot values (current_user); return '1'; end $$;
        create function own.less(date, date) returns boolean language plpgsql as
        $$ begin insert into loot values (current_user); return true; end $$;
        create operator own.>= (leftarg = date, rightarg = date, function = own.less);
        set search_path = own, pg_temp, pg_catalog, jobs_lib;
    """)
    # Our schema has no such day, and no other schema is searched.
    with contextlib.suppress(psycopg.errors.UndefinedTable):
        attacker.execute(call)
    assert attacker.execute("select who from pg_temp.loot").fetchall() == []
    there = attacker.execute("select to_regclass(%s)", (f"pg_temp.{gone}",)).fetchone()
    assert there != (None,)


@pytest.mark.guarantee("FS14", "I1", "I18")
def test_the_library_writes_nothing_into_a_temporary_table(
    database_url, connect, admin
):
    session = connect(autocommit=True)
    names = shadow(session)
    app = make_app(database_url)

    @app.job(group="group")
    def work(job, group: str) -> None:
        """Do nothing."""

    with session.transaction():
        work.enqueue(session, group="a")
        work.options(unique="u").enqueue(session, group="a")
        work.enqueue_many(session, [{"group": "b"}])
        app.topic("states").send(session, key="k", value=1)
    session.execute("select jobs_lib.enqueue('work', '{}', \"group\" => 'c')")
    session.execute("select jobs_lib.send('states', 'k', '1')")
    session.execute("select jobs_lib.send_current('states', 'k', 'things')")
    assert (count(admin, "jobs"), count(admin, "outbox")) == (4, 3)
    landed = {
        name: session.execute(f"select count(*) from pg_temp.{name}").fetchone()
        for name in names
    }
    assert set(landed.values()) == {(0,)}, landed
