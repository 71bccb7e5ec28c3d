"""The command `jobs-lib where`."""

from __future__ import annotations

import sys
from dataclasses import asdict, astuple, fields

import click

from jobs_lib.app import load_app
from jobs_lib.cli.options import PARTITIONS, FiniteRange, app_argument
from jobs_lib.cli.terminal import json_option, printable, show, show_json
from jobs_lib.kafka.newest import SECONDS


@click.command("where")
@app_argument
@click.argument("topic")
@click.argument("key")
@click.option(
    "--seconds",
    type=FiniteRange(0, 3_600),
    default=SECONDS,
    show_default=True,
    help="How long to read the topic for KEY, backwards from its end.",
)
@click.option(
    "--partition",
    type=PARTITIONS,
    help="Where KEY is, if its producer does not choose partitions as Java's does.",
)
@json_option
def where(
    app: str,
    topic: str,
    key: str,
    seconds: float,
    partition: int | None,
    as_json: bool,
) -> None:
    """Find where the newest change of KEY is: table, outbox, TOPIC, or a consumer.

    The last line names the first place that it has not passed, and why. Exits with 1
    unless it has arrived everywhere.
    """
    from jobs_lib.operating.where import where as find
    from jobs_lib.operating.where_places import Place

    found = find(load_app(app), topic, key, seconds=seconds, partition=partition)
    if as_json:
        show_json(asdict(found))
    else:
        show([one.name for one in fields(Place)], map(astuple, found.places), False)
        click.echo(printable(found.verdict))
    sys.exit(0 if found.has_arrived else 1)
