"""The tables: install, upgrade, and check them.

The migrations are Alembic's, with a version table of their own in the library's schema:
they can run from the command line, from code, or inside a migration of the user's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from jobs_lib.errors import SchemaVersionError, UnavailableError
from jobs_lib.settings import masked_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.engine import URL

VERSION_TABLE = "jobs_lib_version"
# One number for the advisory lock that lets several pods migrate at once.
_MIGRATE_LOCK = 0x6A6F6273_6C696200


def quote(identifier: str) -> str:
    """An SQL identifier in double quotes, safe for any name."""
    return '"' + identifier.replace('"', '""') + '"'


def sqlalchemy_url(url: str) -> URL:
    """The URL with psycopg 3 as its driver."""
    return make_url(url).set(drivername="postgresql+psycopg")


def migrations_path() -> Path:
    """Where the migrations lie: in the installed package, or in the repository."""
    package = Path(__file__).parent
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def latest_version() -> str:
    """The version of the tables that this release is made for."""
    head = ScriptDirectory(str(migrations_path())).get_current_head()
    if head is None:
        raise SchemaVersionError(f"no migrations lie in {migrations_path()}")
    return head


def upgrade(connection: Connection, schema: str = "jobs_lib") -> None:
    """Install or upgrade the tables in the transaction of an SQLAlchemy connection.

    Meant for a user's own Alembic migration, too: ``upgrade(op.get_bind())``. Several
    processes may call it at once; the later ones wait and find nothing left to do.
    """
    config = Config()
    config.set_main_option("script_location", str(migrations_path()).replace("%", "%%"))
    config.attributes["connection"] = connection
    config.attributes["schema"] = schema
    connection.execute(
        text("select pg_advisory_xact_lock(:key)"), {"key": _MIGRATE_LOCK}
    )
    path = connection.execute(text("show search_path")).scalar_one()
    command.upgrade(config, "head")
    # The migrations set the path for the rest of the transaction: give it back.
    connection.execute(
        text("select set_config('search_path', :path, true)"), {"path": path}
    )


def migrate(url: str, schema: str = "jobs_lib") -> str:
    """Install or upgrade the tables in the database at ``url``; return the version.

    Raises:
        UnavailableError: the database does not answer.
    """
    engine = create_engine(sqlalchemy_url(url), poolclass=NullPool)
    try:
        with engine.begin() as connection:
            upgrade(connection, schema)
    except OperationalError as error:
        raise UnavailableError(
            f"the database at {masked_url(url)} does not answer: "
            f"{str(error.orig).splitlines()[0]}. Is it running, and is "
            "JOBS_LIB_DATABASE_URL right?"
        ) from None
    finally:
        engine.dispose()
    return latest_version()


def installed_version(connection: Connection, schema: str = "jobs_lib") -> str | None:
    """The version of the tables in the database; None where there are none."""
    context = MigrationContext.configure(
        connection,
        opts={"version_table": VERSION_TABLE, "version_table_schema": schema},
    )
    return context.get_current_revision()


def include_name(
    schema: str = "jobs_lib",
) -> Callable[[str | None, str, dict[str, str | None]], bool]:
    """A filter that keeps a user's ``alembic --autogenerate`` off our tables.

    Pass it in your ``env.py``: ``context.configure(…, include_name=include_name())``.
    It matters only with ``include_schemas=True``, or when the library's schema is the
    default one of the connection.
    """

    def keep(name: str | None, type_: str, parent_names: dict[str, str | None]) -> bool:
        if type_ == "schema":
            return name != schema
        return parent_names.get("schema_name") != schema

    return keep
