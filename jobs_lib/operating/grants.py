"""Grant each kind of role exactly the rights that it needs, and revoke them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from jobs_lib.errors import OperatingError
from jobs_lib.operating.session import bounded
from jobs_lib.postgres.revisions import check_version

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from jobs_lib.postgres.database import Database

Kind = Literal["service", "enqueue", "answer", "read", "migrate", "none"]
KINDS: tuple[Kind, ...] = ("service", "enqueue", "answer", "read", "migrate", "none")


def list_grants(database: Database, kind: Kind, role: str) -> list[str]:
    """List the statements that grant a role the rights of its kind.

    Args:
        database: where the tables are.
        kind: ``service`` runs jobs, consumers and the relay; ``enqueue`` only enqueues
            jobs and sends records; ``answer`` only asks read models how far they are,
            and keeps entities for their answers; ``read`` reads all but the contents
            of jobs and records; ``migrate`` owns the tables; ``none`` revokes all
            rights.
        role: a role of PostgreSQL.

    Raises:
        OperatingError: there is no such role, or the owner would lose its rights.
        SchemaVersionError: there are no tables, or they are of another release.
    """
    with _open(database, kind) as connection:
        return _list(connection, database, kind, role)


def apply_grants(database: Database, kind: Kind, role: str) -> list[str]:
    """Run what :func:`list_grants` lists, all or nothing; later migrations add to it.

    Raises:
        OperatingError: there is no such role, or the connecting role may not grant all
            of it; nothing was changed.
        SchemaVersionError: there are no tables, or they are of another release.
    """
    with _open(database, kind) as connection:
        statements = _list(connection, database, kind, role)
        for statement in statements:
            connection.execute(statement.encode())
        values = {"schema": database.schema, "kind": kind, "role": role}
        # PostgreSQL only warns a role that may grant a part, and leaves out the rest.
        rows = connection.execute(database.queries["list_lacking"], values).fetchall()
        if rows:
            raise OperatingError(
                f"{connection.info.user} may not grant {rows[0][0]} to {role}: nothing "
                "was changed. Connect as the owner of the tables, or as a superuser"
            )
    return statements


@contextmanager
def _open(
    database: Database, kind: Kind
) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    if kind != "migrate":
        check_version(database)
    with database.connect("grants") as connection, bounded(connection, database):
        connection.execute(database.queries["hide_path"])
        yield connection


def _list(
    connection: psycopg.Connection[tuple[Any, ...]],
    database: Database,
    kind: Kind,
    role: str,
) -> list[str]:
    values = {"schema": database.schema, "kind": kind, "role": role}

    def rows(query: str) -> list[Any]:
        found = connection.execute(database.queries[query], values, prepare=False)
        return [row[0] for row in found]

    if rows("role_exists") != [True]:
        raise OperatingError(
            f"there is no role {role!r}: make it with `create role`, and try again"
        )
    if kind == "migrate":
        return rows("list_ownership")
    if kind == "none":
        if rows("owns_tables") == [True]:
            raise OperatingError(
                f"the role {role} owns the tables, and keeps its rights: let another "
                "role own them first, with `jobs-lib grants migrate ROLE`"
            )
        return rows("list_revokes")
    return rows("list_grants") + rows("note_grantee")
