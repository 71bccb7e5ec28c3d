"""Versions of read models: one is current, and others are filled beside it.

Readers know one name of each table, and the current version has it. The tables of other
versions have names of their own. So the name of a version's table changes when another
becomes current; a consumer asks for it whenever it takes partitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib.naming import Exact

if TYPE_CHECKING:
    from collections.abc import Iterable

    import psycopg

    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.postgres.queries import Queries


LONGEST = 63
"""The bytes of a name in PostgreSQL, which cuts longer ones."""
SUFFIX = "_rm"
"""The end of a table's name by which everybody knows who writes it."""


@dataclass(frozen=True, slots=True)
class Version:
    """The version of a read model, as it is declared."""

    number: int
    group: str | Exact
    """The consumer group of the first version."""
    is_said: bool
    """Whether the declaration says a version."""


def name_table(table: str, version: int) -> str:
    """Name a table of a version that is not current."""
    stem = table.removesuffix(SUFFIX)
    return f"{stem}_v{version}{SUFFIX if stem != table else ''}"


def name_model(table: str, version: int) -> str:
    """Name a version of a read model, for good; ``table`` is its first one."""
    return table if version == 1 else name_table(table, version)


def name_group(group: str | Exact, version: int) -> str | Exact:
    """Name the consumer group of a version: each has its own."""
    if version == 1:
        return group
    if isinstance(group, Exact):
        return Exact(f"{group.name}.v{version}")
    return f"{group}.v{version}"


def place(
    connection: psycopg.Connection[Any],
    queries: Queries,
    declared: Iterable[Subscription],
    *,
    waits: bool = False,
) -> None:
    """Give the tables of read models the names that they have now.

    Args:
        connection: without a transaction, or in one.
        queries: the statements.
        declared: of any topics; those that are no read models stay as they are.
        waits: until no switch is under way. A switch that begins later lets go of all
            partitions that have an offset by now. Needs the rights of a service.
    """
    models = [one for one in declared if one.model is not None]
    if not models:
        return
    with connection.transaction():
        rows = connection.execute(
            queries["hold_current_versions" if waits else "read_current_versions"],
            {"models": [one.first_table for one in models]},
        ).fetchall()
    # Where no process has started with them yet, the lowest version will be current.
    current: dict[str, int] = {}
    for one in models:
        lowest = current.get(one.first_table, one.version.number)
        current[one.first_table] = min(lowest, one.version.number)
    current |= dict(rows)
    for one in models:
        one.place(current[one.first_table])


def add(
    connection: psycopg.Connection[Any],
    queries: Queries,
    declared: Iterable[Subscription],
) -> None:
    """Note the versions that an app declares; the lowest one is current at first.

    Args:
        connection: without a transaction.
        queries: the statements.
        declared: what the app reads.
    """
    found: dict[str, list[Subscription]] = {}
    for one in declared:
        # A re-synchronisation has a group of its own for a while.
        if one.is_read_model and not one.is_again:
            found.setdefault(one.first_table, []).append(one)
    for table, versions in found.items():
        if not any(one.version.is_said for one in versions):
            continue
        lowest, *_ = ordered = sorted(versions, key=lambda one: one.version.number)
        first = _describe(table, lowest) | {"version": 1, "group": lowest.first_group}
        with connection.transaction():
            # A first version that no release has called so: its table is there.
            row = connection.execute(queries["has_read"], first).fetchone()
            before = row is not None and row[0]
            connection.execute(
                queries["add_current_version"],
                first if before else _describe(table, lowest),
            )
            for one in ordered:
                connection.execute(queries["add_version"], _describe(table, one))


def _describe(table: str, declared: Subscription) -> dict[str, Any]:
    return {
        "model": table,
        "version": declared.version.number,
        "tables": declared.plain_tables,
        "group": declared.group,
        "topic": declared.topic,
    }
