"""Where the migrations lie, which there are, and which tables fit this release.

A service asks that at its start. It must not load Alembic for it, which would keep
25 MB for as long as the service runs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from psycopg import errors, sql

from jobs_lib.errors import SchemaVersionError
from jobs_lib.masking import masked_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs_lib.postgres.database import Database

_VERSION = re.compile("[0-9]{4}_[a-z0-9_]+")
"""The form of a version of the tables, such as ``0004_jobs``."""


def migrations_path() -> Path:
    """The folder of the migrations: in the installed package, or in the repository."""
    package = Path(__file__).parents[1]
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def known_versions() -> list[str]:
    """The versions of the tables that this release knows, in their order.

    This release is made for the last one. Each file is called by its version.

    Raises:
        SchemaVersionError: the migrations are not installed.
    """
    folder = migrations_path()
    found = [one.stem for one in (folder / "versions").glob("[0-9]*.py")]
    if not found:
        raise SchemaVersionError(f"no migrations lie in {folder}")
    return sorted(found)


def check_version(database: Database) -> str:
    """Return the version of the tables, if this release can use them.

    Raises:
        SchemaVersionError: there are no tables, or they do not fit.
        UnavailableError: the database does not answer.
    """
    schema, known = database.schema, known_versions()
    version = sql.Identifier(schema, "jobs_lib_version")
    installation = sql.Identifier(schema, "installation")
    with database.connect("check", answer_within=database.timeout) as connection:
        try:
            row = connection.execute(
                sql.SQL("select version_num from {}").format(version)
            ).fetchone()
        except (errors.UndefinedTable, errors.InvalidSchemaName):
            row = None
        if row is None:
            raise SchemaVersionError(
                f"schema {schema!r} of the database at {masked_url(database.url)} has "
                "no tables of jobs_lib: run `jobs-lib migrate`"
            )
        installed = str(row[0])
        check_lineage(schema, known, installed)
        serves = installed
        if installed > known[-1]:
            (serves,) = connection.execute(
                sql.SQL("select compatible_from from {}").format(installation)
            ).fetchone() or (installed,)
    check_fit(schema, known, installed, serves)
    return installed


def check_lineage(schema: str, known: Sequence[str], installed: str) -> None:
    """Refuse tables with a version that no release has.

    A version is a number and a subject. Versions are compared as text, and Alembic
    reads ``0005`` as an abbreviation of another version, so a bare number would be
    mistaken for that one. A version that this release does not know can only be of a
    later release, and so sorts behind its own.

    Args:
        schema: of the tables.
        known: the versions that the release knows, in order.
        installed: the version of the tables.

    Raises:
        SchemaVersionError: no release has this version.
    """
    if not _VERSION.fullmatch(installed) or (
        installed not in known and installed < known[-1]
    ):
        raise _of_no_release(schema, installed)


def check_fit(
    schema: str, known: Sequence[str], installed: str, compatible_from: str
) -> None:
    """Refuse tables that a release cannot work with.

    Args:
        schema: of the tables.
        known: the versions that the release knows. It is made for the last one.
        installed: the version of the tables.
        compatible_from: the oldest version whose releases the tables still serve.

    Raises:
        SchemaVersionError: the tables are older, too new for the release, or of none.
    """
    expected = known[-1]
    if installed < expected:
        raise SchemaVersionError(
            f"the tables in schema {schema!r} have version {installed}, this release "
            f"needs {expected}: run `jobs-lib migrate`"
        )
    if expected < compatible_from:
        raise SchemaVersionError(
            f"the tables in schema {schema!r} have version {installed}, which is newer "
            f"and serves releases made for {compatible_from} or later. This one is "
            f"made for {expected}: install a newer release of jobs_lib"
        )
    # A later release has all versions of this one, so it names one that is known here.
    if installed > expected and compatible_from not in known:
        raise _of_no_release(schema, installed)


def _of_no_release(schema: str, installed: str) -> SchemaVersionError:
    return SchemaVersionError(
        f"the tables in schema {schema!r} have version {installed}, which no release "
        "of jobs_lib has, so no migration leads on from it: drop the schema with all "
        "jobs and rows in it, and run `jobs-lib migrate`"
    )
