"""Divide a table's keys into ranges; one transaction loads each of them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib.errors import ReexportError
from jobs_lib.reexport.source import Source, find_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobs_lib.outbox.topic import Entity
    from jobs_lib.postgres.queries import Queries

KEYS_PER_RANGE = 20_000
"""Keys in a range, if the number of ranges is not given.

Each range costs its statements and a commit. The larger it is, the more is loaded again
after its task was killed.
"""
RANGE_LIMIT = 10_000
"""The largest number of ranges: in larger tables a range holds more keys."""
SAMPLED_FROM = 5_000_000
"""Tables of this many rows are cut by a sample: sorting all keys takes minutes."""
_SAMPLE_ROWS = 500_000


@dataclass(frozen=True, slots=True)
class Range:
    """Keys k with ``lower <= k < upper`` in the key's own order; None is open.

    A bound is written as the key of a record.
    """

    lower: str | None
    upper: str | None
    keys: int
    """The planned number of keys."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The source and the ranges that a re-export loads."""

    source: Source
    ranges: tuple[Range, ...]

    @property
    def total(self) -> int:
        """The number of all keys; an estimate if a sample cut the ranges."""
        return sum(piece.keys for piece in self.ranges)


def range_size(total: int, ranges: int | None) -> int:
    """Return the keys in each range when ``total`` keys make ``ranges`` ranges."""
    if ranges is None:
        ranges = min(RANGE_LIMIT, max(1, -(-total // KEYS_PER_RANGE)))
    return max(1, -(-total // ranges))


def make_ranges(cuts: Sequence[str], total: int) -> tuple[Range, ...]:
    """Make ranges that begin at the sorted cuts: every key is in exactly one.

    The first range has no lower bound and the last one no upper bound, so keys that are
    inserted after the planning lie in one of them, too.
    """
    # Equal cuts would make an empty range.
    distinct = list(dict.fromkeys(cuts))
    bounds: list[str | None] = [None, *distinct, None]
    count = len(bounds) - 1
    each, rest = divmod(total, count)
    return tuple(
        Range(bounds[i], bounds[i + 1], each + (i < rest)) for i in range(count)
    )


def plan_ranges(
    connection: psycopg.Connection[Any],
    queries: Queries,
    entity: Entity,
    ranges: int | None = None,
    sampled_from: int = SAMPLED_FROM,
) -> Plan:
    """Cut the keys of the entity's table into ranges of about equal size.

    It works for keys of any columns that PostgreSQL can sort, however skewed the values
    are. A key in many rows counts once.

    Args:
        connection: to the service's database.
        queries: for the library's schema.
        entity: what ``@app.entity`` declared.
        ranges: the number of ranges. Defaults to one for each 20,000 keys, 10,000 at
            most.
        sampled_from: with this many rows or more, a sample decides.

    Raises:
        ReexportError: the table or column is missing, a row has no key, or keys have no
            order.
    """
    if ranges is not None and not 1 <= ranges <= RANGE_LIMIT:
        raise ReexportError(
            f"a re-export has 1 to {RANGE_LIMIT:,} ranges, not {ranges}: without a "
            f"number there is one for each {KEYS_PER_RANGE:,} keys"
        )
    with connection.transaction():
        connection.execute(queries["settle_text_forms"])
        source = find_source(connection, queries, entity)
        with _sortable(source, entity):
            return _cut(connection, queries, entity, source, ranges, sampled_from)


def _cut(
    connection: psycopg.Connection[Any],
    queries: Queries,
    entity: Entity,
    source: Source,
    ranges: int | None,
    sampled_from: int,
) -> Plan:
    _refuse_null_keys(connection, queries, entity, source)
    if source.estimate is not None and source.estimate >= sampled_from:
        return _plan_by_sample(connection, queries, source, ranges)
    suffix = "" if source.unique else "_distinct"
    count = source.query(queries, f"source_count{suffix}")
    total = int((connection.execute(count).fetchone() or (0,))[0])
    cuts = connection.execute(
        source.query(queries, f"source_cuts{suffix}", size=range_size(total, ranges))
    ).fetchall()
    return Plan(source, make_ranges([cut for (cut,) in cuts], total))


@contextmanager
def _sortable(source: Source, entity: Entity) -> Iterator[None]:
    """Say it plainly if a column of the key has no order."""
    try:
        yield
    except psycopg.errors.UndefinedFunction:
        raise ReexportError(
            f"the key of the entity {entity.name!r} has columns of the types "
            f"{', '.join(source.types)}, and PostgreSQL cannot sort one of them, so no "
            "ranges can be cut: declare the entity with another key, or a view that "
            "casts it to text as `source`"
        ) from None


def _plan_by_sample(
    connection: psycopg.Connection[Any],
    queries: Queries,
    source: Source,
    ranges: int | None,
) -> Plan:
    total = source.estimate or 0
    percent = min(100.0, 100.0 * _SAMPLE_ROWS / max(1, total))
    size = max(1, int(range_size(total, ranges) * percent / 100))
    cuts = connection.execute(
        source.query(queries, "source_cuts_sampled", percent=percent, size=size)
    ).fetchall()
    return Plan(source, make_ranges([cut for (cut,) in cuts], total))


def _refuse_null_keys(
    connection: psycopg.Connection[Any],
    queries: Queries,
    entity: Entity,
    source: Source,
) -> None:
    if not source.nullable:
        return
    row = connection.execute(source.query(queries, "source_has_null_key")).fetchone()
    if row and row[0]:
        missing = " or ".join(source.columns)
        raise ReexportError(
            f"rows of {source.table!r} have no {missing!r}, so the entity "
            f"{entity.name!r} has no key to send them under: give them one, or declare "
            "a view without them as `source`"
        )
