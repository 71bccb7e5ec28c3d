"""The tables: dead rows, indexes that have grown, statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.operating.checks.finding import Finding
from jobs_lib.postgres.values import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.operating.checks.finding import Look


def check_bloat(look: Look) -> Iterator[Finding]:
    """Tables and indexes are about as large as what they hold."""
    schema = look.database.schema
    for table, live, dead in look.rows(
        "check_dead_rows", schema=schema, dead=look.limits.dead_rows
    ):
        yield Finding(
            "warn",
            "bloat",
            f"the table {table} has {dead:,} dead rows and {live:,} live ones",
            f"look for an old transaction, then vacuum {quote(schema)}.{quote(table)}",
        )
    for index, size, expected in look.rows(
        "check_indexes", schema=schema, bytes=look.limits.index_bytes
    ):
        if size > look.limits.index_growth * expected:
            yield Finding(
                "warn",
                "bloat",
                f"the index {index} has {size / 2**20:,.0f} MB, about "
                f"{expected / 2**20:,.0f} MB are expected",
                f"reindex index concurrently {quote(schema)}.{quote(index)}",
            )


def check_statistics(look: Look) -> Iterator[Finding]:
    """The planner knows the tables as they are."""
    schema = look.database.schema
    for table, rows, changed, at in look.rows(
        "check_statistics", schema=schema, rows=look.limits.unanalyzed_rows
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
