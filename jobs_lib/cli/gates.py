"""The command `jobs-lib gates`."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any

import click

from jobs_lib.app import load_app
from jobs_lib.cli.options import FiniteRange, app_argument
from jobs_lib.cli.terminal import json_option, show, watch
from jobs_lib.errors import OperatingError


@click.command("gates")
@app_argument
@click.option(
    "--watch",
    "seconds",
    type=FiniteRange(0.1),
    help="Show them again after this many seconds, until Ctrl-C.",
)
@json_option
def gates(app: str, seconds: float | None, as_json: bool) -> None:
    """Show for which groups each partition of a consumer waits, and how far they are.

    It shows the consumers that are declared with `after`. A group that has committed
    nothing is missing.
    """
    from jobs_lib.operating.gates import GatePart, list_gates

    loaded = load_app(app)
    columns = [one.name for one in fields(GatePart)]

    def read() -> list[tuple[Any, ...]]:
        return [astuple(one) for one in list_gates(loaded)]

    if seconds is None:
        show(columns, read(), as_json)
    elif as_json:
        raise OperatingError("--json prints once: leave --watch out")
    else:
        watch(columns, read, seconds)
