"""A check's findings, its target, and the limits from which it complains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import psycopg

    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings

Level = Literal["ok", "warn", "error"]
_NAMED = 5
"""How many names a line has before it only counts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check about one thing."""

    level: Level
    check: str
    what: str
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """The values from which something is wrong."""

    old_transaction: float = 60.0
    """Seconds; ten times as old is an error."""
    naptime: float = 60.0
    """Seconds between two runs of autovacuum on a database."""
    dead_rows: int = 50_000
    """Dead rows in a table, if they also outnumber the live ones."""
    index_bytes: int = 64 * 2**20
    index_growth: float = 4.0
    """How many times larger than expected an index may be."""
    unanalyzed_rows: int = 10_000
    """Rows of a table without fresh statistics."""
    multixacts: float = 0.8
    """The share of the age at which autovacuum vacuums every table. 2.5 times as old,
    and at least twice that age, is an error."""
    behind: int = 100
    """Jobs of a group behind a head that has failed."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target of the checks, reached through one connection."""

    connection: psycopg.Connection[Any]
    database: Database
    settings: Settings
    limits: Limits
    role: str | None
    """The role whose privileges are checked; None for the connecting role."""

    def rows(self, query: str, **values: object) -> list[tuple[Any, ...]]:
        """Read the rows of a named query."""
        return self.connection.execute(
            self.database.queries[query], values, prepare=False
        ).fetchall()


def names(found: list[str]) -> str:
    """Write some names as text, and how many more there are."""
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")
