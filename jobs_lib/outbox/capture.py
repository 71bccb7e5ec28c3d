"""Send every change of a table: a trigger writes id-only rows to the outbox.

Use it in a migration of the application::

    from jobs_lib import capture_changes

    def upgrade() -> None:
        capture_changes(op, "aircraft", topic="aircraft-state", key="tail")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from psycopg import sql

from jobs_lib.outbox.keys import check_columns
from jobs_lib.postgres.values import identify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg.sql import Composed

_NAME = "jobs_lib_capture"
_TRUNCATE = "jobs_lib_capture_truncate"


class Executor(Protocol):
    """Alembic's ``op``, a connection, or another object that runs SQL."""

    def execute(self, statement: Any, /) -> Any:
        """Run a statement."""


def capture_changes(
    op: Executor,
    table: str,
    *,
    topic: str,
    key: str | Sequence[str],
    entity: str | None = None,
    version: str = "version",
    schema: str = "jobs_lib",
) -> None:
    """Send the state of each row of a table after an insert, update or delete.

    The trigger writes only which entity has changed. The relay reads the state, by the
    function that ``app.entity`` declares, and sends a tombstone if the entity is gone.
    A change of the key is refused: consumers would keep the old key for ever. So is a
    truncate, which names no rows: delete the rows instead.

    Args:
        op: Alembic's ``op``, or a connection.
        table: ``table`` or ``schema.table``.
        topic: where the states go.
        key: the column whose text is the record's key; or several columns, whose
            texts :func:`jobs_lib.join_key` makes into one. As in ``app.entity``.
        entity: the name given to ``app.entity``. Defaults to ``table``.
        version: the column of the version that the states carry, if the table has it:
            the tombstone of a deleted row has the next version. Give ``""`` if the
            states carry none.
        schema: the schema of this library's tables.
    """
    columns = check_columns(key, f"the table {table!r}")
    first, *others = (columns,) if isinstance(columns, str) else columns
    arguments = (topic, entity or table, first, version, *others)
    statement = sql.SQL(
        "create trigger {name} after insert or update or delete on {table}"
        " for each row execute function {function}({arguments})"
    ).format(
        name=sql.Identifier(_NAME),
        table=identify(table),
        function=sql.Identifier(schema, "capture_change"),
        # The other columns of the key come last: most keys have one column.
        arguments=sql.SQL(", ").join(map(sql.Literal, arguments)),
    )
    _run(op, statement)
    refusal = sql.SQL(
        "create trigger {name} before truncate on {table}"
        " for each statement execute function {function}()"
    ).format(
        name=sql.Identifier(_TRUNCATE),
        table=identify(table),
        function=sql.Identifier(schema, "refuse_truncate"),
    )
    _run(op, refusal)


def stop_capturing(op: Executor, table: str) -> None:
    """Stop sending the changes of a table."""
    # Somebody may have dropped the second trigger, to truncate the table.
    for name, drop in ((_NAME, "drop trigger"), (_TRUNCATE, "drop trigger if exists")):
        _run(
            op,
            sql.SQL("{drop} {name} on {table}").format(
                drop=sql.SQL(drop), name=sql.Identifier(name), table=identify(table)
            ),
        )


def _run(op: Executor, statement: Composed) -> None:
    op.execute(statement.as_string())
