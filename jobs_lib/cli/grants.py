"""The command `jobs-lib grants …`."""

from __future__ import annotations

from typing import cast

import click

from jobs_lib import operating
from jobs_lib.operating.grants import KINDS, Kind
from jobs_lib.postgres.database import Database
from jobs_lib.settings import default_settings


@click.command()
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("role")
@click.option("--apply", is_flag=True, help="Run the SQL, as the owner of the tables.")
def grants(kind: str, role: str, apply: bool) -> None:
    """Print the SQL that grants ROLE its rights, or run it.

    A service runs jobs, consumers and the relay; enqueue only enqueues jobs and sends
    records; answer only asks read models how far they are, and keeps entities for their
    answers; read reads all but payloads; migrate owns the tables; none revokes every
    right on the tables.
    """
    database = Database.of(default_settings())
    chosen = cast("Kind", kind)
    if apply:
        operating.apply_grants(database, chosen, role)
        done = (
            f"revoked: all from {role}"
            if kind == "none"
            else f"granted: {kind} to {role}"
        )
        click.echo(done)
        return
    for statement in operating.list_grants(database, chosen, role):
        click.echo(f"{statement};")
