"""The tables of read models, which only their consumer's role may write.

Use it in a migration of the application::

    from jobs_lib import create_read_model

    def upgrade() -> None:
        create_read_model(
            op,
            "aircraft_rm",
            key="tail",
            columns={"airport": "text not null", "seats": "int"},
            writer="board_consumer",
            readers=["board_web"],
        )
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from psycopg import sql

from jobs_lib.consuming.versions import LONGEST, SUFFIX
from jobs_lib.errors import ConfigurationError
from jobs_lib.postgres.queries import load_queries
from jobs_lib.postgres.values import identify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.outbox.capture import Executor

VERSION = "version"
MARK = "read model of jobs_lib; key: "
"""The start of the table's comment; the name of the key follows."""
_EVERYBODY = "public"


def create_read_model(
    op: Executor,
    table: str,
    *,
    key: str,
    columns: Mapping[str, str],
    key_sql_type: str = "text",
    writer: str | None = None,
    readers: Iterable[str] = (),
    fillfactor: int = 80,
) -> None:
    """Create the table of a read model, which only its consumer's role may write.

    It has the key, ``version bigint`` and the given columns. All rights that default
    privileges have granted on it are revoked. If there is a writer, the role that runs
    the migration may no longer write the table either, though it owns it.

    Args:
        op: Alembic's ``op``, or a psycopg connection.
        table: ``table`` or ``schema.table``; its name ends in ``_rm``.
        key: the column of the record's key, which is the primary key.
        columns: the types of the other columns by their names, in the form of SQL, such
            as ``{"seats": "int not null"}``.
        key_sql_type: the type of the key's column, in the form of SQL.
        writer: the role that the consumer connects as. Defaults to the role that runs
            the migration, which owns the table.
        readers: the roles that may read it, such as the application's; ``"public"`` for
            every role.
        fillfactor: how full inserts leave each page, in percent, from 10 to 100. The
            rest is room for updates.

    Raises:
        ConfigurationError: a name or a value cannot be; no SQL was run.
    """
    statements = write_statements(
        table,
        key=key,
        columns=columns,
        key_sql_type=key_sql_type,
        writer=writer,
        readers=readers,
        fillfactor=fillfactor,
    )
    for statement in statements:
        # Alembic takes `:name` for a parameter; a definition may have it in a text.
        is_alembic = hasattr(op, "get_context")
        op.execute(statement.replace(":", r"\:") if is_alembic else statement)


def write_statements(
    table: str,
    *,
    key: str,
    columns: Mapping[str, str],
    key_sql_type: str,
    writer: str | None,
    readers: Iterable[str],
    fillfactor: int,
) -> list[str]:
    """The statements that :func:`create_read_model` runs, for the same arguments.

    Raises:
        ConfigurationError: a name or a value cannot be.
    """
    _check_table(table)
    what = f"the read model's table {table!r}"
    _check_columns(what, key, key_sql_type, columns)
    readers = _check_roles(what, writer, readers)
    if type(fillfactor) is not int or not 10 <= fillfactor <= 100:
        raise ConfigurationError(
            f"the fillfactor of {what} is {fillfactor!r}: give percent, 10 to 100"
        )
    name = identify(table)
    values = {
        "table": name,
        "name": sql.Literal(name.as_string()),
        "mark": sql.Literal(f"{MARK}{key}"),
        "key": sql.Identifier(key),
        "key_sql_type": sql.SQL(cast("Any", key_sql_type)),
        "columns": sql.SQL("").join(
            sql.SQL(",\n    {} {}").format(
                sql.Identifier(column), sql.SQL(cast("Any", definition))
            )
            for column, definition in columns.items()
        ),
        "fillfactor": sql.Literal(fillfactor),
        "writer": sql.Identifier(writer or ""),
        "readers": sql.SQL(", ").join(map(_name_role, readers)),
    }
    return [_fill(query, values) for query in _choose(writer, readers)]


def _choose(writer: str | None, readers: list[str]) -> Iterator[str]:
    yield from ("make_model_table", "mark_model_table", "close_model_table")
    if writer is not None:
        # The writer may be the owner itself: the grant comes second.
        yield from ("keep_owner_out", "let_write")
    if readers:
        yield "let_read"


def _fill(query: str, values: Mapping[str, sql.Composable]) -> str:
    # Nothing here lies in the library's own schema.
    template = load_queries("jobs_lib")[query].as_string()
    return sql.SQL(cast("Any", template)).format(**values).as_string()


def _name_role(role: str) -> sql.Composable:
    return sql.SQL("public") if role == _EVERYBODY else sql.Identifier(role)


def _check_table(table: object) -> None:
    parts = table.split(".") if isinstance(table, str) else []
    if not parts or len(parts) > 2 or not all(map(_is_name, parts)):
        raise ConfigurationError(
            f"{table!r} is no name for a read model's table: give 'aircraft{SUFFIX}', "
            f"or with its schema 'board.aircraft{SUFFIX}'"
        )
    if not parts[-1].endswith(SUFFIX):
        raise ConfigurationError(
            f"the read model's table {table!r} needs the suffix {SUFFIX}, so that "
            f"everybody sees that its consumer writes it: call it '{table}{SUFFIX}'"
        )


def _check_columns(what: str, key: object, key_type: object, columns: object) -> None:
    if not isinstance(columns, Mapping):
        raise ConfigurationError(
            f"the columns of {what} are {columns!r}: give a mapping from names to "
            "types, as in {'seats': 'int not null'}"
        )
    for column, definition in [(key, key_type), *columns.items()]:
        if not _is_name(column):
            raise ConfigurationError(
                f"{column!r} is no name for a column of {what}: give a text of 1 to "
                f"{LONGEST} bytes"
            )
        if column == VERSION:
            raise ConfigurationError(
                f"{what} has a column {VERSION} of its own, a bigint: leave it out"
            )
        if not isinstance(definition, str) or not definition.strip():
            raise ConfigurationError(
                f"the type of the column {column!r} of {what} is {definition!r}: give "
                "it in the form of SQL, as in 'int not null'"
            )
    if key in columns:
        raise ConfigurationError(
            f"{what} names its key {key!r} among its columns, too: leave it out there"
        )


def _check_roles(what: str, writer: object, readers: object) -> list[str]:
    if writer is not None and (not _is_name(writer) or writer == _EVERYBODY):
        raise ConfigurationError(
            f"the writer of {what} is {writer!r}: give the one role that its consumer "
            "connects as, such as 'board_consumer'"
        )
    is_list = isinstance(readers, Iterable) and not isinstance(readers, str | bytes)
    given = list(cast("Iterable[Any]", readers)) if is_list else []
    if not is_list or not all(map(_is_name, given)):
        raise ConfigurationError(
            f"the readers of {what} are {readers!r}: give a list of roles, such as "
            "['board_web']"
        )
    return given


def _is_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and 0 < len(name.encode(errors="replace")) <= LONGEST
        and "\0" not in name
    )
