"""What the app and the database know of the versions of a read model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib.consuming.versions import name_table
from jobs_lib.errors import OperatingError

if TYPE_CHECKING:
    import psycopg

    from jobs_lib.app import App
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.postgres.database import Database


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A version of a read model, as the database knows it."""

    number: int
    tables: list[str]
    """By the names that readers know."""
    group: str
    topic: str
    is_current: bool

    def list_places(self) -> dict[str, str]:
        """List the names that the tables have now."""
        return {name: self._place(name, self.is_current) for name in self.tables}

    def list_next_places(self, version: int) -> dict[str, str]:
        """List the names that they have once another version is current."""
        return {name: self._place(name, self.number == version) for name in self.tables}

    def _place(self, table: str, is_current: bool) -> str:
        return table if is_current else name_table(table, self.number)


def list_declared(app: App, table: str) -> list[Subscription]:
    """List the versions that an app declares of a read model, by its first table."""
    return [
        one for one in app.consumers if one.is_read_model and one.first_table == table
    ]


def read_versions(
    connection: psycopg.Connection[Any], database: Database, table: str
) -> dict[int, ModelVersion]:
    """Read which versions of a read model the database knows, by their numbers."""
    rows = connection.execute(
        database.queries["read_versions"], {"model": table}
    ).fetchall()
    return {row[0]: ModelVersion(*row) for row in rows}


def choose_version(
    found: dict[int, ModelVersion], table: str, version: int
) -> ModelVersion:
    """Choose a version by its number.

    Raises:
        OperatingError: the database does not know it.
    """
    if version not in found:
        known = ", ".join(map(str, found)) or "none"
        raise OperatingError(
            f"the database knows no version {version} of {table!r}, but: {known}. A "
            "version is known once a process that declares it has started"
        )
    return found[version]


def count_untold(
    connection: psycopg.Connection[Any], database: Database, one: ModelVersion
) -> int:
    """Count the offsets left of which a version alone tells, by its `on_change`."""
    names = {"group": one.group, "topic": one.topic}
    row = connection.execute(database.queries["count_untold"], names).fetchone()
    assert row is not None
    return int(row[0])
