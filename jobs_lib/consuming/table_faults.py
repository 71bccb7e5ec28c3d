"""What is wrong with the tables of read models, before a record is applied to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs_lib.consuming.model_table import MARK, VERSION
from jobs_lib.postgres.values import identify, quote, split_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import psycopg

    from jobs_lib.postgres.queries import Queries

_WRITES = "insert, update, delete, truncate, trigger"


class ModelTable(NamedTuple):
    """A table that a read model declares."""

    name: str
    """``table`` or ``schema.table``."""
    key: str
    """The column of the record's key."""
    versions_beside: bool = False
    """Whether its versions are in another table: then its form is free."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a table."""

    what: str
    way_out: str


@dataclass(frozen=True, slots=True)
class FoundTable:
    """What the database says of a table, as seen by the role that should write it."""

    name: str
    key: str
    is_there: bool
    version_type: str | None
    """None: it has no such column."""
    has_key: bool
    is_unique: bool
    """Whether the key alone is unique."""
    role: str
    """The role that the table was looked at for."""
    owner: str | None
    lacking: list[str]
    """The rights that the role lacks."""
    is_owner: bool
    """Whether the role owns the table; a superuser does."""
    is_writer: bool
    """Whether the role, or a group of it, was granted the right to write."""
    owner_writes: bool
    """Whether the owner, no superuser, may write."""
    others: list[str]
    """The roles that were granted the right to write, without that one."""
    applications: list[str]
    """The roles that `jobs-lib grants` has let only enqueue or read, and that may
    write."""
    versions_beside: bool = False
    """Whether its versions are in another table: then its form is free."""

    @property
    def _quoted(self) -> str:
        return identify(self.name).as_string()

    def find_faults(self) -> Iterator[Fault]:
        """What keeps a read model from using the table, whoever writes it."""
        if not self.is_there:
            yield Fault(
                f"the table {self.name} of a read model is not in this database, or "
                "not in the search path",
                "make it in a migration by create_read_model, or by the SQL that "
                "`jobs-lib readmodel create` prints",
            )
            return
        if not self.has_key:
            yield Fault(
                f"the table {self.name} of a read model has no column {self.key} for "
                "the key",
                "name the column in `key=`, or add it",
            )
        elif not self.is_unique and not self.versions_beside:
            yield Fault(
                f"the table {self.name} of a read model may hold a key twice: the "
                f"column {self.key} alone is not unique",
                f"alter table {self._quoted} add primary key ({quote(self.key)})",
            )
        if self.versions_beside:
            return
        if self.version_type is None:
            yield Fault(
                f"the table {self.name} of a read model has no column {VERSION}",
                f"alter table {self._quoted} add column {VERSION} bigint",
            )
        elif self.version_type != "bigint":
            yield Fault(
                f"the column {VERSION} of the read model's table {self.name} is of "
                f"type {self.version_type}, and versions are bigint",
                f"alter table {self._quoted} alter column {VERSION} type bigint",
            )

    def find_lacking(self) -> Iterator[Fault]:
        """What keeps the role from writing the table."""
        if self.lacking:
            yield Fault(
                f"the role {self.role} lacks {', '.join(self.lacking)} for the read "
                f"model's table {self.name}",
                "grant select, insert, update, delete on table "
                f"{self._quoted} to {quote(self.role)}, and usage on its schema",
            )

    @property
    def only_writer(self) -> str | None:
        """The role that the consumer must have, if the one looked at is no writer.

        None if several roles may be it, or none.
        """
        found = {*self.others} - {*self.applications, "public"}
        return found.pop() if len(found) == 1 and not self.is_writer else None

    def find_others(self, writer: str | None = None) -> Iterator[Fault]:
        """Who may write the table besides the role looked at and another writer."""
        granted = {*self.others} - {writer}
        if not granted and not self.applications:
            return
        way_out = [f"revoke {_WRITES} on table {self._quoted} from {_join(granted)}"]
        if others := {*self.applications} - granted:
            way_out.append(
                f"take {_join(others)} out of the roles that may, or let another role "
                "own it"
            )
        yield Fault(
            "others than the consumer's role may write the read model's table "
            f"{self.name}: {_join(granted | {*self.applications})}",
            "; ".join(way_out if granted else way_out[1:]),
        )


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def find_tables(
    connection: psycopg.Connection[Any], queries: Queries, tables: Iterable[ModelTable]
) -> list[FoundTable]:
    """Look at the tables that an app declares, for the role that is connected."""
    parts = [(one, *split_table(one.name)) for one in tables]
    beside = {one.name for one, _, _ in parts if one.versions_beside}
    rows = connection.execute(
        queries["find_model_tables"],
        {
            "names": [one.name for one, _, _ in parts],
            "schemas": [schema for _, schema, _ in parts],
            "tables": [name for _, _, name in parts],
            "keys": [one.key for one, _, _ in parts],
            "role": None,
        },
        prepare=False,
    )
    found = [FoundTable(*row) for row in rows]
    return [replace(one, versions_beside=one.name in beside) for one in found]


def find_marked(
    connection: psycopg.Connection[Any], queries: Queries, role: str | None
) -> list[FoundTable]:
    """Look at all tables that ``create_read_model`` has made.

    Args:
        connection: in a transaction.
        queries: the statements.
        role: the role for which; None for the one that is connected.
    """
    rows = connection.execute(
        queries["find_marked_tables"],
        {"mark": f"^{MARK}(.+)$", "role": role},
        prepare=False,
    )
    return [FoundTable(*row) for row in rows]
