"""Names in SQL, and values in the forms that PostgreSQL reads fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from psycopg import sql


def quote(identifier: str) -> str:
    """An SQL identifier in double quotes, safe for any name."""
    return '"' + identifier.replace('"', '""') + '"'


def split_table(table: str) -> tuple[str | None, str]:
    """Split ``table`` or ``schema.table`` into schema and name.

    The schema ends at the first dot. All others belong to the table's own name: no
    statement may name a table of another database, so there is no third part.
    """
    schema, dot, name = table.partition(".")
    return (schema, name) if dot else (None, table)


def identify(table: str) -> sql.Identifier:
    """Name a table in SQL; ``table`` is split by :func:`split_table`."""
    # The import of an app loads no driver.
    from psycopg import sql

    schema, name = split_table(table)
    return sql.Identifier(name) if schema is None else sql.Identifier(schema, name)


def int_array(values: Iterable[int]) -> str:
    """PostgreSQL's text form of an array; several times quicker than the driver's."""
    return "{" + ",".join(map(str, values)) + "}"


def text_array(values: Sequence[str]) -> str:
    """The same for strings."""
    if not values:
        return "{}"
    joined = '"' + '","'.join(values) + '"'
    if "\\" in joined or joined.count('"') != 2 * len(values):
        escaped = (v.replace("\\", "\\\\").replace('"', '\\"') for v in values)
        joined = '"' + '","'.join(escaped) + '"'
    return "{" + joined + "}"


def escape(value: str | None) -> str:
    """A value as a column of COPY's text format."""
    if value is None:
        return "\\N"
    if value.isalnum():
        return value
    return (
        value.replace("\\", "\\\\")
        .replace("\t", "\\t")
        .replace("\n", "\\n")
        .replace("\r", "\\r")
    )
