"""The roles that may read the tables of a read model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from jobs_lib.errors import OperatingError
from jobs_lib.postgres.values import identify

if TYPE_CHECKING:
    from jobs_lib.operating.model_versions import ModelVersion
    from jobs_lib.postgres.database import Database


def copy_readers(
    connection: psycopg.Connection[Any],
    database: Database,
    old: ModelVersion,
    new: ModelVersion,
) -> None:
    """Let everybody read the new tables who may read the old ones.

    Raises:
        OperatingError: the old tables show only some rows or columns to some roles, and
            the new ones cannot do the same.
    """
    before, after = old.list_places(), new.list_places()
    for name in before.keys() & after.keys():
        found = [
            connection.execute(
                database.queries["find_readers"],
                {"table": identify(places[name]).as_string()},
            ).fetchone()
            for places in (before, after)
        ]
        (readers, has_policies), (_, has_new) = ((r or ([], False)) for r in found)
        if has_policies and not has_new:
            raise OperatingError(
                f"policies say who may read which rows of {before[name]}, and "
                f"{after[name]} has none: enable row level security there, too"
            )
        for reader in readers:
            connection.execute(
                sql.SQL("grant select on table {} to {}").format(
                    identify(after[name]), _name_role(reader)
                )
            )
        _copy_column_readers(connection, database, before[name], after[name])


def _copy_column_readers(
    connection: psycopg.Connection[Any], database: Database, before: str, after: str
) -> None:
    rows = connection.execute(
        database.queries["find_column_readers"],
        {"table": identify(before).as_string()},
    ).fetchall()
    try:
        for column, reader in rows:
            connection.execute(
                sql.SQL("grant select ({}) on table {} to {}").format(
                    sql.Identifier(column), identify(after), _name_role(reader)
                )
            )
    except psycopg.errors.UndefinedColumn:
        raise OperatingError(
            f"{reader or 'everybody'} may read the column {column} of {before} alone, "
            f"and {after} has no such column: revoke the right first"
        ) from None


def _name_role(role: str | None) -> sql.Composable:
    """Name a role; None is everybody."""
    return sql.SQL("public") if role is None else sql.Identifier(role)
