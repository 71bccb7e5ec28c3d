"""The tables: install, upgrade, and check them.

Alembic runs the migrations, with a version table of their own in the library's schema.
They can run from the command line, from code, or inside a user's own migration.

Migrations give way to the transactions that use the tables. A change of a table waits
until every transaction that uses the table has ended, and every later one waits behind
the change: one transaction left open would stop all writers. So a migration waits for a
lock only briefly; then it leaves the queue, lets the writers through, and tries again.
"""

from __future__ import annotations

import io
import random
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import psycopg
from alembic import command, context, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg import sql
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import OperationalError

from jobs_lib import telemetry
from jobs_lib.addresses import libpq_url
from jobs_lib.errors import (
    ConfigurationError,
    OperatingError,
    SchemaVersionError,
)
from jobs_lib.naming import make_template
from jobs_lib.postgres import revisions
from jobs_lib.postgres.database import (
    DATABASE_VARIABLE,
    DIRECT_VARIABLE,
    connection_options,
    is_lost,
    no_answer,
)
from jobs_lib.postgres.environment import adopt, record_environment
from jobs_lib.postgres.session import Session, answered_within
from jobs_lib.postgres.values import quote
from jobs_lib.settings import (
    check_schema,
    default_settings,
    require_database_url,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy import Connection, Engine

    from jobs_lib.settings import Settings

VERSION_TABLE = "jobs_lib_version"
MIGRATE_LOCK = 0x6A6F6273_6C696200
"""The number of the advisory lock; several pods may start to migrate at once."""
LOCK_SECONDS = 0.5
"""How long a migration, and so a writer behind it, waits for one lock. It is less than
the server's deadlock_timeout: the migration leaves a deadlock, not a writer."""
_PATIENCE = 300.0
"""Seconds after which a migration gives up if it never got its locks."""
_TIMEOUT = 30.0
"""Seconds without an answer, if there are no settings."""
_NOT_LET_IN = {"55P03", "40P01"}
_MOST_SHARDS = 1_024


def choose_url(settings: Settings) -> str:
    """The URL for migrations: past PgBouncer, if the settings have a direct URL.

    Raises:
        ConfigurationError: no URL is set.
    """
    url = require_database_url(settings)
    return settings.direct_url or url


def make_engine(url: str, timeout: float) -> Engine:
    """The engine that migrations open the database with; it keeps no connection."""
    # Prepared statements would be lost behind PgBouncer, and none is run often.
    options = connection_options("migrate", timeout, prepares=False)

    def connect() -> psycopg.Connection[Any]:
        # SQLAlchemy itself cannot read every URL that libpq reads.
        connection = Session.connect(libpq_url(url), autocommit=True, **options)
        # A proxy completes the login although its server is away.
        with answered_within(connection, timeout):
            connection.execute("select 1")
        connection.autocommit = False
        return connection

    return create_engine(
        "postgresql+psycopg://",
        creator=connect,
        poolclass=NullPool,
        isolation_level="READ COMMITTED",
    )


def _script() -> ScriptDirectory:
    return ScriptDirectory(str(revisions.migrations_path()))


def upgrade(
    connection: Connection,
    schema: str | None = None,
    settings: Settings | None = None,
    *,
    shards: int | None = None,
) -> None:
    """Install or upgrade the tables in the transaction of an SQLAlchemy connection.

    A user's own Alembic migration may call it, too: ``upgrade(op.get_bind())``, with
    other operations before and after. Several processes may call it at once; the
    later ones wait and find nothing left to do. Its locks last until the transaction
    ends.

    Args:
        connection: in a transaction.
        schema: where the tables lie. Defaults to the settings' ``schema_name``, which
            is ``jobs_lib`` unless ``JOBS_LIB_SCHEMA`` says otherwise.
        settings: whose environment the database serves. Defaults to those of this
            process, if ``JOBS_LIB_ENVIRONMENT`` names one.
        shards: as for :func:`migrate`.

    Raises:
        ConfigurationError: the database serves another environment, or there can be no
            such schema or number of shards.
        OperatingError: other transactions did not let it change the tables in time, or
            they have another number of shards.
        SchemaVersionError: the tables are of a release that this one cannot work with.
    """
    schema = _choose_schema(schema, settings)
    if settings is None and default_settings().environment:
        settings = default_settings()
    _lock_out_others(connection)
    pending = _pending(connection, schema)
    new = _is_new(connection, schema, shards)
    if pending:
        _give_way(connection, schema, pending[-1])
    if new and shards is not None:
        _set_shards(connection, schema, shards)
    record_environment(connection, schema, settings)


def migrate(
    url: str,
    schema: str = "jobs_lib",
    settings: Settings | None = None,
    *,
    copied_from: str = "",
    shards: int | None = None,
) -> str:
    """Install or upgrade the tables in the database at ``url``; return their version.

    Each migration is a transaction of its own, so none holds the locks of earlier
    ones while it waits for its own. If the tables are of a newer release that this one
    can work with, they stay as they are.

    Args:
        url: of the database.
        schema: where the tables lie.
        settings: whose environment the database serves. Defaults to none.
        copied_from: another environment, if this database is a copy of its database.
            The original does the work that waits there, so it is deleted here: jobs,
            rows of the outbox, offsets, topics. The copy gets an identity of its own,
            so that neither fences the other's producers.
        shards: of the outbox, between 1 and 1024, fixed when the tables are installed;
            each has one relay at a time. Defaults to 16, or to the tables' number.

    Raises:
        ConfigurationError: the database serves another environment, or there can be no
            such schema or number of shards.
        UnavailableError: the database does not answer.
        OperatingError: other transactions did not let it change the tables in time, or
            they have another number of shards.
        SchemaVersionError: the tables are of a release that this one cannot work with.
    """
    check_schema(schema)
    engine = make_engine(url, settings.database_timeout if settings else _TIMEOUT)
    try:
        while True:
            with engine.begin() as connection:
                _lock_out_others(connection)
                pending = _pending(connection, schema)
                new = _is_new(connection, schema, shards)
                if not pending:
                    if settings is not None and copied_from:
                        adopt(connection, schema, settings, copied_from)
                    record_environment(connection, schema, settings)
                    return str(installed_version(connection, schema))
                _give_way(connection, schema, pending[0])
                if new and shards is not None:
                    _set_shards(connection, schema, shards)
    except OperationalError as error:
        if is_lost(_sqlstate(error)):
            is_direct = settings is not None and url == settings.direct_url
            variable = DIRECT_VARIABLE if is_direct else DATABASE_VARIABLE
            raise no_answer(url, error.orig, variable) from None
        raise
    finally:
        engine.dispose()


def write_sql(
    schema: str = "jobs_lib",
    settings: Settings | None = None,
    *,
    since: str | None = None,
    shards: int | None = None,
) -> str:
    """The migrations as SQL for psql, in one transaction; connects to no database.

    Args:
        schema: where the tables lie.
        settings: whose environment the database serves. Defaults to none.
        since: the version of the tables. Defaults to none: the SQL installs them.
        shards: as for :func:`migrate`.

    Raises:
        ConfigurationError: there can be no such schema or number of shards, or a number
            of shards is given for tables that exist already.
        SchemaVersionError: there is no such version.
    """
    check_schema(schema)
    _check_shards(shards)
    known = [one.revision for one in _script().walk_revisions()]
    if since is not None and since not in known:
        raise SchemaVersionError(
            f"there is no version {since!r} of the tables: it is one of "
            f"{known[-1]} to {known[0]}, as the table {VERSION_TABLE} says"
        )
    if since is not None and shards is not None:
        raise ConfigurationError(
            "the number of shards is fixed when the tables are installed: leave it out"
        )
    printed = io.StringIO()
    config = _config(schema)
    config.output_buffer = printed
    if since is None:
        config.attributes["last"] = _first_values(schema, settings, shards)
    command.upgrade(config, "head" if since is None else f"{since}:head", sql=True)
    return printed.getvalue()


def _first_values(
    schema: str, settings: Settings | None, shards: int | None
) -> list[str]:
    values: dict[str, str | int] = {} if shards is None else {"shards": shards}
    if settings is not None:
        values["environment"] = settings.environment
        values["topic_template"] = make_template(settings)
    return [
        sql.SQL("update {} set {} = {}")
        .format(
            sql.Identifier(schema, "installation"),
            sql.Identifier(name),
            sql.Literal(value),
        )
        .as_string()
        for name, value in values.items()
    ]


def _lock_out_others(connection: Connection) -> None:
    connection.execute(
        text("select pg_advisory_xact_lock(:key)"), {"key": MIGRATE_LOCK}
    )


def _pending(connection: Connection, schema: str) -> list[str]:
    """The migrations that the tables still need, in order."""
    known = [revision.revision for revision in _script().walk_revisions()][::-1]
    installed = installed_version(connection, schema)
    if installed is None:
        return known
    check_installed(connection, schema, known, installed)
    return known[known.index(installed) + 1 :] if installed in known else []


def check_installed(
    connection: Connection, schema: str, known: Sequence[str], installed: str
) -> None:
    """Refuse tables of a version that no release has, or too new for this one.

    Args:
        connection: to the database.
        schema: where the tables lie.
        known: the versions that this release knows, in order.
        installed: the version of the tables.

    Raises:
        SchemaVersionError: the release cannot work with the tables.
    """
    revisions.check_lineage(schema, known, installed)
    if installed in known:
        return
    serves = connection.execute(
        text(f"select compatible_from from {quote(schema)}.installation")
    ).scalar_one()
    revisions.check_fit(schema, known, installed, serves)


def _is_new(connection: Connection, schema: str, shards: int | None) -> bool:
    """Whether there are no tables yet; existing ones must have this many shards."""
    _check_shards(shards)
    if installed_version(connection, schema) is None:
        return True
    found = connection.execute(
        text(f"select shards from {quote(schema)}.installation")
    ).scalar_one()
    if shards not in (None, found):
        raise OperatingError(
            f"the outbox in schema {schema!r} has {found} shards, not {shards}: its "
            "rows lie by that number, so it is fixed when the tables are installed. "
            f"Ask for {found}, or for none"
        )
    return False


def _check_shards(shards: int | None) -> None:
    if shards is not None and not 1 <= shards <= _MOST_SHARDS:
        raise ConfigurationError(
            f"the outbox cannot have {shards} shards: choose 1 to {_MOST_SHARDS}"
        )


def _set_shards(connection: Connection, schema: str, shards: int) -> None:
    connection.execute(
        text(f"update {quote(schema)}.installation set shards = :shards"),
        {"shards": shards},
    )


def _give_way(connection: Connection, schema: str, target: str) -> None:
    """Upgrade to ``target`` inside a savepoint: leaving it releases the locks."""
    before = {
        name: connection.execute(text(f"show {name}")).scalar_one()
        for name in ("search_path", "lock_timeout")
    }
    began = time.monotonic()
    for tries in count(1):
        try:
            with connection.begin_nested():
                _upgrade(connection, schema, target)
        except OperationalError as error:
            if _sqlstate(error) not in _NOT_LET_IN:
                raise
            waited = time.monotonic() - began
            if waited > _PATIENCE:
                raise OperatingError(
                    f"the tables in schema {schema!r} could not be changed to version "
                    f"{target} in {waited:.0f} s, because other transactions lock "
                    "them: `jobs-lib check` names the oldest one. End it, and run "
                    "this again"
                ) from None
            telemetry.emit("tables.busy", version=target, tries=tries)
            # The pause is longer than the wait: writers wait less than half the time.
            time.sleep(LOCK_SECONDS * random.uniform(1, 2))
        else:
            break
    # Migrations set these for the rest of the transaction: restore them.
    for name, value in before.items():
        connection.execute(
            text("select set_config(:name, :value, true)"),
            {"name": name, "value": value},
        )


def _sqlstate(error: OperationalError) -> str | None:
    # psycopg 2 calls it pgcode.
    orig = error.orig
    return getattr(orig, "sqlstate", None) or getattr(orig, "pgcode", None)


def _choose_schema(given: str | None, settings: Settings | None = None) -> str:
    schema = given or (settings or default_settings()).schema_name
    check_schema(schema)
    return schema


def _upgrade(connection: Connection, schema: str, target: str) -> None:
    config = _config(schema)
    config.attributes["connection"] = connection
    with _proxies_kept():
        command.upgrade(config, target)


@contextmanager
def _proxies_kept() -> Iterator[None]:
    """Restore Alembic's modules for the migration that called us.

    Alembic's ``op`` and ``context`` stand for one migration at a time, and for none
    once the latest one has ended: without this, the caller's next operation would fail.
    """
    before = [getattr(module, "_proxy", None) for module in (context, op)]
    try:
        yield
    finally:
        for proxy in before:
            if proxy is not None:
                proxy._install_proxy()


def _config(schema: str) -> Config:
    config = Config()
    config.set_main_option(
        "script_location", str(revisions.migrations_path()).replace("%", "%%")
    )
    config.attributes["schema"] = schema
    return config


def installed_version(connection: Connection, schema: str = "jobs_lib") -> str | None:
    """The version of the tables in the database; None where there are none."""
    context = MigrationContext.configure(
        connection,
        opts={"version_table": VERSION_TABLE, "version_table_schema": schema},
    )
    return context.get_current_revision()


def include_name(
    schema: str | None = None,
) -> Callable[[str | None, str, dict[str, str | None]], bool]:
    """A filter that makes a user's ``alembic --autogenerate`` ignore our tables.

    Pass it in your ``env.py``: ``context.configure(…, include_name=include_name())``.
    It matters only with ``include_schemas=True``, or when the library's schema is the
    default one of the connection.

    Args:
        schema: where our tables lie. Defaults to the settings' ``schema_name``.
    """
    ours = _choose_schema(schema)

    def keep(name: str | None, type_: str, parent_names: dict[str, str | None]) -> bool:
        if type_ == "schema":
            return name != ours
        return parent_names.get("schema_name") != ours

    return keep
