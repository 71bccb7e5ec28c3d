"""The command `jobs-lib jobs enqueue`: the only one of its group that needs an app."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from jobs_lib.app import load_app
from jobs_lib.cli.jobs import jobs
from jobs_lib.cli.options import TIMES, FiniteRange
from jobs_lib.cli.terminal import json_option, show_json
from jobs_lib.errors import OperatingError
from jobs_lib.jobs.options import PRIORITIES

if TYPE_CHECKING:
    from jobs_lib.app import App
    from jobs_lib.jobs.type import JobType

__all__ = ["jobs"]


@jobs.command()
@click.argument("type_", metavar="TYPE")
@click.argument("fields", metavar="[FIELD=VALUE]...", nargs=-1)
@click.option(
    "--app",
    "path",
    metavar="MODULE:APP",
    envvar="JOBS_LIB_APP",
    required=True,
    show_envvar=True,
    help="The app that has the type.",
)
@click.option("--payload", metavar="JSON", help="All fields at once, as one object.")
@click.option("--run-at", type=TIMES, help="Run it at this time (UTC) or later.")
@click.option(
    "--delay",
    type=FiniteRange(),
    metavar="SECONDS",
    help="Run it after this many seconds.",
)
@click.option("--priority", type=click.Choice(list(PRIORITIES)))
@click.option("--unique", metavar="KEY", help="Only if no unfinished job has this key.")
@json_option
def enqueue(
    type_: str,
    fields: tuple[str, ...],
    path: str,
    payload: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Enqueue a job of TYPE, checked as the app checks it, and print its id.

    A VALUE is JSON if it can be read as JSON, else text; for a field of type str it is
    always text. The type chooses the group, as always.
    """
    with closing(load_app(path)) as app:
        job_type = _find_type(app, type_, path)
        if fields and payload is not None:
            raise OperatingError("give the fields one by one or --payload, not both")
        if payload is None:
            payload = json.dumps(_parse(job_type, fields))
        values = job_type.payload.read(payload)
        job = job_type.options(**_choose_options(**options)).enqueue(app, **values)
    if as_json:
        show_json({"id": job})
    else:
        click.echo(job)


def _find_type(app: App, name: str, path: str) -> JobType[Any]:
    if name not in app.jobs:
        known = ", ".join(sorted(app.jobs)) or "none"
        raise OperatingError(f"{path} has no job type {name!r}; it has: {known}")
    return app.jobs[name]


def _parse(job_type: JobType[Any], fields: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in fields:
        name, equals, text = field.partition("=")
        if not equals:
            raise OperatingError(
                f"{field!r} is no field: write FIELD=VALUE, as in order=7"
            )
        if name in values:
            raise OperatingError(f"the field {name!r} is given twice")
        is_text = job_type.payload.hints.get(name) is str
        values[name] = text if is_text else _read_value(text)
    return values


def _read_value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def _refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity: they are no JSON, though Python reads them."""
    raise ValueError(name)


def _choose_options(run_at: datetime | None, **options: Any) -> dict[str, Any]:
    """Keep the options that were given; all others stay as the type has them."""
    at = None if run_at is None else run_at.replace(tzinfo=UTC)
    given = {"run_at": at, **options}
    return {name: value for name, value in given.items() if value is not None}
