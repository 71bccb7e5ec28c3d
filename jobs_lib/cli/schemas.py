"""The commands `jobs-lib schemas …`."""

from __future__ import annotations

import sys
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs_lib.app import load_app
from jobs_lib.cli.options import app_argument
from jobs_lib.cli.terminal import json_option, show

if TYPE_CHECKING:
    from jobs_lib.operating.schemas import Finding


@click.group()
def schemas() -> None:
    """The Avro schemas of a service's topics."""


@schemas.command("check")
@app_argument
@click.option(
    "--against",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Compare with FOLDER/<subject>/<version>.avsc, without a registry.",
)
@click.option(
    "--forward", is_flag=True, help="With --against: as for FORWARD_TRANSITIVE."
)
@json_option
def schemas_check(app: str, against: Path | None, forward: bool, as_json: bool) -> None:
    """Exit with 1 if a schema does not fit every version registered before."""
    from jobs_lib.operating.schemas import FORWARD, FULL, check_against, check_schemas

    if forward and against is None:
        raise click.UsageError("--forward needs --against: a registry knows its level")
    if against is None:
        findings = check_schemas(load_app(app))
    else:
        findings = check_against(load_app(app), against, FORWARD if forward else FULL)
    _show_findings(findings, as_json)


@schemas.command("register")
@app_argument
@json_option
def schemas_register(app: str, as_json: bool) -> None:
    """Check, then register what the service declares: a step of its deployment."""
    from jobs_lib.operating.schemas import register_schemas

    findings, ids = register_schemas(load_app(app))
    _show_findings(findings, as_json)
    for subject, schema_id in ids.items():
        click.echo(f"registered: {subject} (id {schema_id})", err=as_json)


def _show_findings(findings: list[Finding], as_json: bool) -> None:
    columns = ("subject", "version", "field", "problem", "fails")
    if findings or as_json:
        show(columns, (astuple(finding) for finding in findings), as_json)
    if any(finding.fails for finding in findings):
        sys.exit(1)
