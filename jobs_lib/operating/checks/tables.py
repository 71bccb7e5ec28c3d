"""Check the tables: dead rows, indexes that have grown, statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.operating.checks.finding import Finding
from jobs_lib.postgres.values import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.operating.checks.finding import Target


def check_bloat(target: Target) -> Iterator[Finding]:
    """Check that tables and indexes are about as large as their contents."""
    schema = target.database.schema
    for table, live, dead in target.rows(
        "check_dead_rows", schema=schema, dead=target.limits.dead_rows
    ):
        yield Finding(
            "warn",
            "bloat",
            f"the table {table} has {dead:,} dead rows and {live:,} live ones",
            f"look for an old transaction, then vacuum {quote(schema)}.{quote(table)}",
        )
    for index, size, expected in target.rows(
        "check_indexes", schema=schema, bytes=target.limits.index_bytes
    ):
        if size > target.limits.index_growth * expected:
            yield Finding(
                "warn",
                "bloat",
                f"the index {index} has {size / 2**20:,.0f} MB, about "
                f"{expected / 2**20:,.0f} MB are expected",
                f"reindex index concurrently {quote(schema)}.{quote(index)}",
            )


def check_statistics(target: Target) -> Iterator[Finding]:
    """Check that the planner has fresh statistics of the tables."""
    schema = target.database.schema
    for table, rows, changed, at in target.rows(
        "check_statistics", schema=schema, rows=target.limits.unanalyzed_rows
    ):
        yield Finding(
            "warn",
            "statistics",
            f"the table {table} has {rows:,} rows and "
            + (
                "was never analyzed"
                if at is None
                else f"{changed:,} changes since it was analyzed"
            ),
            f"analyze {quote(schema)}.{quote(table)}",
        )
