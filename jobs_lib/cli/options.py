"""What several commands are given."""

from __future__ import annotations

import click

app_argument = click.argument("app", metavar="MODULE:APP", envvar="JOBS_LIB_APP")


wait_option = click.option(
    "--wait",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds for open transactions that have enqueued jobs with groups.",
)


processes_option = click.option(
    "--processes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Share the work between so many processes.",
)
