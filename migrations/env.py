"""Alembic's entry point for the tables of jobs_lib.

Run it by ``jobs-lib migrate``, :func:`jobs_lib.postgres.migrate.upgrade`, or the
``alembic`` command beside this folder. The version table lies in the library's own
schema, so that these migrations can live beside those of other applications.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alembic import context
from psycopg import sql

from jobs_lib.postgres.migrate import (
    LOCK_SECONDS,
    MIGRATE_LOCK,
    VERSION_TABLE,
    check_installed,
    choose_url,
    make_engine,
)
from jobs_lib.postgres.queries import load_queries
from jobs_lib.postgres.revisions import known_versions
from jobs_lib.settings import default_settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection

# `create schema if not exists` needs the right to make schemas even if this one exists.
MAKE_SCHEMA = sql.SQL("""do $do$
begin
    if not exists (select from pg_namespace where nspname = {name}) then
        create schema {schema};
    end if;
end
$do$""")

# A printed script checks the version by itself: it may be run on other tables.
CHECK_VERSION = sql.SQL("""do $do$
begin
    if (select version_num from {table}) is distinct from {version} then
        raise exception 'the tables have not the version that this script is for'
            using hint = 'Print it anew, with the version that they have.';
    end if;
end
$do$""")


def run(schema: str, last: Iterable[str] = (), **where: Any) -> None:
    """Run or print the migrations in ``schema``, in one transaction.

    Args:
        schema: where the tables lie.
        last: statements that end the transaction.
        where: the connection, or what Alembic needs to print instead.
    """
    queries, offline = load_queries(schema), context.is_offline_mode()
    names = {"name": sql.Literal(schema), "schema": sql.Identifier(schema)}
    context.configure(
        version_table=VERSION_TABLE,
        version_table_schema=schema,
        transactional_ddl=True,
        **where,
    )
    with context.begin_transaction():
        if offline:
            # Do not rely on the default: at this level a statement that has waited for
            # a lock sees the latest rows.
            context.execute("set transaction isolation level read committed")
        # Several migrations at once take turns. The caller may hold this lock already.
        context.execute(f"select pg_advisory_xact_lock({MIGRATE_LOCK})")
        # Writers queue behind a change that waits for its lock: it must not wait long.
        context.execute(f"set local lock_timeout to {int(LOCK_SECONDS * 1_000)}")
        context.execute(MAKE_SCHEMA.format(**names).as_string())
        # The path is local to the transaction, so it does not affect the caller's later
        # statements. Temporary tables come last when a revision looks a name up, too.
        path = sql.SQL("set local search_path to {schema}, pg_temp")
        context.execute(path.format(**names).as_string())
        since = context.get_starting_revision_argument() if offline else None
        if since is not None:
            table = sql.Identifier(schema, VERSION_TABLE)
            check = CHECK_VERSION.format(table=table, version=sql.Literal(since))
            context.execute(check.as_string())
        installed = None if offline else context.get_context().get_current_revision()
        if installed is not None:
            # Alembic would continue from a version whose name only begins alike.
            check_installed(context.get_bind(), schema, known_versions(), installed)
        context.run_migrations()
        for query in ("settle_functions", "settle_grants"):
            context.execute(queries[query].as_string())
        for statement in last:
            context.execute(statement)


attributes = context.config.attributes
given: Connection | None = attributes.get("connection")
schema: str = attributes.get("schema") or default_settings().schema_name
if context.is_offline_mode():
    run(
        schema,
        attributes.get("last", ()),
        dialect_name="postgresql",
        # The driver's own style would double every %.
        dialect_opts={"paramstyle": "named"},
        literal_binds=True,
    )
elif given is not None:
    run(schema, connection=given)
else:
    settings = default_settings()
    engine = make_engine(choose_url(settings), settings.database_timeout)
    with engine.begin() as opened:
        run(schema, connection=opened)
