"""Tables that lack an index, upgraded by a release that makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib.postgres.migrate import migrate
from tests.support.releases import NextRelease

if TYPE_CHECKING:
    from pathlib import Path

# To make the index, the server reads the whole table, and nobody can write meanwhile. A
# small file takes some hundredths of a second.
IF_SMALL = """do $small$
begin
    if pg_relation_size('{table}') < 67108864 then
        {definition};
    end if;
end
$small$;"""
"""How a revision makes an index on a table that pods write to."""


def makes_index(url: str, folder: Path, statements: list[str], index: str) -> bool:
    """Whether an upgrade makes an index on tables that the statements have filled.

    Args:
        url: of an empty database.
        folder: where the next release is written.
        statements: executed on the tables that lack the index.
        index: its name. Its definition is that of this release.
    """
    migrate(url)
    with psycopg.connect(url, autocommit=True) as connection:
        table, definition = _read(connection, index)
        connection.execute(f"drop index jobs_lib.{index}")
        for statement in statements:
            connection.execute(statement)
    later = NextRelease(folder, [IF_SMALL.format(table=table, definition=definition)])
    with later.installed():
        assert migrate(url) == later.version
    with psycopg.connect(url) as connection:
        found = _read(connection, index)
    assert found in ((table, definition), None)
    return found is not None


def _read(connection: psycopg.Connection[Any], index: str) -> Any:
    return connection.execute(
        "select indrelid::regclass::text, pg_get_indexdef(indexrelid) from pg_index"
        " where indexrelid = to_regclass(%s)",
        (f"jobs_lib.{index}",),
    ).fetchone()
