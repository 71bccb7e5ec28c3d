"""Pauses: types, origins and groups whose jobs must not start now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import OperatingError
from jobs_lib.operating.session import bounded

if TYPE_CHECKING:
    from datetime import datetime

    import psycopg

    from jobs_lib.postgres.database import Database

KINDS = ("type", "origin", "group")


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of a type, an origin or a group."""

    kind: str
    name: str
    paused_at: datetime


@dataclass(frozen=True, slots=True)
class Change:
    """The result of :func:`pause` or :func:`resume`."""

    changed: bool
    """False if it was so already."""
    known: bool
    """Whether anything has this name now; something may also get it later."""


def pause(database: Database, kind: str, name: str) -> Change:
    """Start no more jobs of a type, an origin or a group, on any pod, until resumed.

    Running jobs go on to their end. Jobs can still be enqueued.

    Raises:
        OperatingError: there is no such kind, or the name is empty.
    """
    return _change(database, "pause", kind, name)


def resume(database: Database, kind: str, name: str) -> Change:
    """Let jobs start again after :func:`pause`.

    Raises:
        OperatingError: there is no such kind, or the name is empty.
    """
    return _change(database, "resume", kind, name)


def list_pauses(database: Database) -> list[Pause]:
    """List all pauses, by kind and name."""
    with database.connect("pauses") as connection, bounded(connection, database):
        rows = connection.execute(database.queries["list_pauses"]).fetchall()
    return [Pause(*row) for row in rows]


def is_known(
    connection: psycopg.Connection[Any], database: Database, kind: str, name: str
) -> bool:
    """Whether a live process, a declared topic or an unfinished job has the name."""
    row = connection.execute(
        database.queries["is_known_name"], {"kind": kind, "name": name}
    ).fetchone()
    return row is not None and bool(row[0])


def _change(database: Database, query: str, kind: str, name: str) -> Change:
    if kind not in KINDS:
        raise OperatingError(f"cannot {query} a {kind!r}: one of {', '.join(KINDS)}")
    if not name or "\0" in name:
        raise OperatingError(f"{name!r} is no name of a {kind}")
    with database.connect(query) as connection, bounded(connection, database):
        done = connection.execute(database.queries[query], {"kind": kind, "name": name})
        return Change(
            changed=done.rowcount > 0,
            known=is_known(connection, database, kind, name),
        )
