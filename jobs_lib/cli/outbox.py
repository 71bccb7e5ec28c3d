"""The commands `jobs-lib outbox …`."""

from __future__ import annotations

from dataclasses import asdict, astuple, fields

import click

from jobs_lib import operating
from jobs_lib.cli.options import IDS
from jobs_lib.cli.terminal import json_option, printable, show, show_json
from jobs_lib.errors import OperatingError
from jobs_lib.operating.outbox import Held, Waiting
from jobs_lib.postgres.database import Database
from jobs_lib.settings import default_settings

_row = click.argument("row", metavar="ID", type=IDS)


@click.group()
def outbox() -> None:
    """Show rows that are not in Kafka yet, and rows that are held."""


@outbox.command()
@click.option("--holds", is_flag=True, help="Show what is held and why, instead.")
@json_option
def status(holds: bool, as_json: bool) -> None:
    """Show the rows that wait, by topic."""
    kind = Held if holds else Waiting
    found = (operating.list_holds if holds else operating.list_waiting)(_database())
    show([one.name for one in fields(kind)], map(astuple, found), as_json)


@outbox.command("show")
@_row
@json_option
def show_(row: int, as_json: bool) -> None:
    """Show one row, and why it is held."""
    found = operating.show_row(_database(), row)
    if found is None:
        raise OperatingError(
            f"the outbox has no row {row}: it is in Kafka, or was never committed"
        )
    if as_json:
        show_json(asdict(found))
        return
    for name, value in asdict(found).items():
        if value is not None:
            click.echo(f"{name + ':':12}{printable(value)}")


@outbox.command()
@click.option("--topic", help="Only of this topic.")
@click.option("--key", help="Only of this key.")
def retry(topic: str | None, key: str | None) -> None:
    """Try held rows at once, without waiting for their next attempt."""
    tried = operating.retry_holds(_database(), topic, key)
    click.echo(f"to be tried: {tried}")


@outbox.command()
@_row
@click.confirmation_option(prompt="It will never reach Kafka. Drop it?")
def drop(row: int) -> None:
    """Delete a held row for good; the rows behind it are tried."""
    operating.drop_row(_database(), row)
    click.echo(f"dropped: {row}")


def _database() -> Database:
    return Database.of(default_settings())
