"""Arguments and options that several commands share."""

from __future__ import annotations

import click

TIMES = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"])
"""The forms of a time, in UTC."""


def log_options() -> list[str]:
    """The options with which a child process logs like its parent."""
    given = click.get_current_context().find_root().params
    options = ["--log-level", given["log_level"], "--log-format", given["log_format"]]
    return [*options, "--verbose"] if given["verbose"] else options


app_argument = click.argument("app", metavar="MODULE:APP", envvar="JOBS_LIB_APP")


wait_option = click.option(
    "--wait",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds to wait for open transactions that have enqueued jobs with groups.",
)


processes_option = click.option(
    "--processes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="The number of processes that share the work.",
)
