"""Count the pages that a query reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Mapping

    import psycopg


def count_pages(
    connection: psycopg.Connection[Any], query: sql.Composed, values: Mapping[str, Any]
) -> tuple[int, str]:
    """Run a query; returns how many pages it reads, and its plan."""
    rows = connection.execute(
        sql.SQL("explain (analyze, buffers) ") + query, values
    ).fetchall()
    plan = "\n".join(line for (line,) in rows)
    # The first line of buffers has those of the whole query.
    buffers = next(line for line in plan.splitlines() if "Buffers: shared" in line)
    counts = [
        int(one.strip(",").partition("=")[2])
        for one in buffers.split()
        if one.startswith(("hit=", "read="))
    ]
    return sum(counts), plan
