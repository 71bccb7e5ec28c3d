"""Alembic's entry point for the tables of jobs_lib.

Run through ``jobs-lib migrate``, :func:`jobs_lib.schema.upgrade`, or the ``alembic``
command beside this folder. The version table lies in the library's own schema, so that
these migrations live beside other people's.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, NullPool, create_engine, text

from jobs_lib.db import quote
from jobs_lib.schema import LOCK_SECONDS, VERSION_TABLE, sqlalchemy_url
from jobs_lib.settings import default_settings, require_database_url


def run(connection: Connection, schema: str) -> None:
    """Run the migrations in ``schema``, in the transaction of ``connection``."""
    if not context.is_offline_mode():
        # Writers queue behind a change that waits for its lock: none waits for long.
        timeout = f"set local lock_timeout to {int(LOCK_SECONDS * 1_000)}"
        connection.execute(text(timeout))
        connection.execute(text(f"create schema if not exists {quote(schema)}"))
        # Local to the transaction: the caller's later statements are not affected.
        connection.execute(text(f"set local search_path to {quote(schema)}"))
    context.configure(
        connection=connection,
        version_table=VERSION_TABLE,
        version_table_schema=schema,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


given: Connection | None = context.config.attributes.get("connection")
schema: str = context.config.attributes.get("schema") or default_settings().schema_name
if given is not None:
    run(given, schema)
else:
    engine = create_engine(
        sqlalchemy_url(require_database_url(default_settings())), poolclass=NullPool
    )
    with engine.begin() as opened:
        run(opened, schema)
