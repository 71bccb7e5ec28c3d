"""The command `jobs-lib read-model …`."""

from __future__ import annotations

import click

from jobs_lib.consuming.model_table import write_statements
from jobs_lib.errors import OperatingError


@click.command("read-model")
@click.argument("table")
@click.option("--key", required=True, help="The column of the record's key.")
@click.option("--key-sql-type", default="text", show_default=True, help="Its type.")
@click.option(
    "--column",
    "columns",
    metavar="NAME=TYPE",
    multiple=True,
    help="Another column and its type in SQL, as in 'seats=int not null'; repeat it.",
)
@click.option("--writer", help="The role of the consumer. Defaults to the owner.")
@click.option(
    "--reader", "readers", multiple=True, help="A role that may read; repeat it."
)
@click.option(
    "--fillfactor",
    type=int,
    default=80,
    show_default=True,
    help="How full inserts leave each page, in percent.",
)
def read_model(
    table: str,
    key: str,
    key_sql_type: str,
    columns: tuple[str, ...],
    writer: str | None,
    readers: tuple[str, ...],
    fillfactor: int,
) -> None:
    """Print the SQL that makes TABLE for a read model; connects to no database.

    Only the role of the consumer may write the table. `create_read_model` does the same
    in a migration.
    """
    statements = write_statements(
        table,
        key=key,
        columns=_read_columns(columns),
        key_sql_type=key_sql_type,
        writer=writer,
        readers=readers,
        fillfactor=fillfactor,
    )
    for statement in ("begin", *statements, "commit"):
        click.echo(f"{statement};")


def _read_columns(given: tuple[str, ...]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for column in given:
        name, equals, definition = column.partition("=")
        if not equals:
            raise OperatingError(
                f"--column {column!r} has no type: write it as in 'seats=int not null'"
            )
        if name in columns:
            raise OperatingError(f"--column {name!r} is given twice: give it once")
        columns[name] = definition
    return columns
