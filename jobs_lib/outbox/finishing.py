"""Mark a re-export as finished when all its rows have left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import psycopg

    from jobs_lib.postgres.queries import Queries


def finish_if_done(
    connection: psycopg.Connection[Any], queries: Queries, reexport: int
) -> bool:
    """Mark a re-export as ended if every key is sent; returns whether this call did.

    It is cheap enough for the relay to call it after each block of a re-export. The
    connection is in autocommit mode, or the isolation level is `read committed`.
    """
    this = {"reexport": reexport}
    finished, uncounted = _finish(connection, queries, this)
    if uncounted:
        # Relays count what transactions have given when they take records. They take
        # none for rows that were superseded or dropped.
        connection.execute(queries["take_records"], {**this, "wanted": 0}, prepare=True)
        finished, _ = _finish(connection, queries, this)
    return finished


def _finish(
    connection: psycopg.Connection[Any], queries: Queries, this: dict[str, int]
) -> tuple[bool, bool]:
    """Returns whether it is finished now, and whether rows must be counted before."""
    row = connection.execute(queries["finish_reexport"], this, prepare=True).fetchone()
    return cast("tuple[bool, bool]", row)
