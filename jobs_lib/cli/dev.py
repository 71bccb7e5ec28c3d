"""The commands `jobs-lib dev up | down | status | env`."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs_lib.addresses import LAST_PORT
from jobs_lib.devstack import external
from jobs_lib.devstack.stack import PROJECT_FOLDER, DevStack
from jobs_lib.errors import DevStackError
from jobs_lib.signals import handle_signals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.devstack.jars import Progress
    from jobs_lib.devstack.stack import Service

_WATCH_SECONDS = 0.5
_PORT = click.IntRange(1, LAST_PORT)

_folder = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=PROJECT_FOLDER,
    show_default=True,
    help="The folder of data, logs and the state file.",
)


@click.group()
def dev() -> None:
    """A real PostgreSQL and Kafka for this project, without Docker."""


@dev.command()
@_folder
@click.option("--postgres-port", type=_PORT, help="Defaults to any free port.")
@click.option("--kafka-port", type=_PORT, help="Defaults to any free port.")
@click.option(
    "--ephemeral",
    is_flag=True,
    help="Stay in the foreground; delete all data at the end.",
)
def up(
    folder: Path, postgres_port: int | None, kafka_port: int | None, ephemeral: bool
) -> None:
    """Start both servers, or find those that run already.

    Data are kept between starts. If a server's environment variable is set, that server
    is used and none is started. The first start downloads Kafka (42 MB).
    """
    with _progress_bar() as progress:
        stack = DevStack(
            folder,
            postgres_port=postgres_port,
            kafka_port=kafka_port,
            progress=progress,
        )
        if ephemeral:
            _run_ephemeral(stack)
            return
        services = stack.up()
    _report(services)
    click.echo(f"# data and logs are in {stack.folder}")


@dev.command()
@_folder
def down(folder: Path) -> None:
    """Stop both servers; their data stay."""
    for service in DevStack(folder).down():
        _say(service, "stopped" if service.changed else "was not running")


@dev.command()
@_folder
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(folder: Path, as_json: bool) -> None:
    """Show where both servers are."""
    services = DevStack(folder).status()
    if as_json:
        click.echo(json.dumps([_as_json(service) for service in services], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("server", "state", "address", "pid", "folder")
    for service in services:
        table.add_row(
            service.name,
            service.state,
            external.shown(service.address or ""),
            str(service.pid or ""),
            str(service.folder or ""),
        )
    # A cut or wrapped address could not be copied.
    console = Console()
    width = None if console.is_terminal else 500
    Console(width=width).print(table)


@dev.command()
@_folder
def env(folder: Path) -> None:
    """Print the addresses for a shell: eval "$(jobs-lib dev env)"."""
    services = DevStack(folder).status()
    for service in services:
        if service.state == "stopped":
            raise DevStackError(
                f"{service.name} does not run: start it with `jobs-lib dev up`, or set "
                f"{service.variable} to a server of yours"
            )
    _print_exports(services)


def _as_json(service: Service) -> dict[str, object]:
    return {
        "server": service.key,
        "state": service.state,
        "address": external.shown(service.address) if service.address else None,
        "pid": service.pid,
        "folder": str(service.folder) if service.folder else None,
    }


def _run_ephemeral(stack: DevStack) -> None:
    ending = threading.Event()
    with stack.ephemeral() as (services, servers):
        ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handle_signals(ends, lambda _: ending.set())
        _report(services)
        click.echo("# Ctrl-C stops both and deletes their data")
        while not ending.wait(_WATCH_SECONDS):
            for server in servers:
                if not server.running:
                    raise DevStackError(
                        f"{server.name} has ended:\n{server.log_tail()}"
                    )


def _report(services: list[Service]) -> None:
    for service in services:
        what = "started" if service.changed else "running"
        if service.secured:
            what = "started again, with a password from now on"
        _say(service, what)
    _print_exports(services)


def _say(service: Service, what: str) -> None:
    if service.state == "external":
        what = f"{service.variable} is set: that server is used, none is started here"
    address = external.shown(service.address or "")
    click.echo(f"# {service.name}: {what}" + (f", {address}" if address else ""))


def _print_exports(services: list[Service]) -> None:
    for service in services:
        if service.state == "external":
            # You have set it yourself, and it may contain a password.
            click.echo(f"# {service.variable} is set already")
            continue
        click.echo(f"export {service.variable}={shlex.quote(service.address or '')}")


@contextlib.contextmanager
def _progress_bar() -> Iterator[Progress]:
    """Show a bar on the terminal from the first jar that is fetched."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    bar = Bar(console=Console(stderr=True), transient=True)
    task = bar.add_task("Fetching Kafka (42 MB, once)", total=None)

    def show(there: int, total: int) -> None:
        # In a file or a pipe, even a bar without lines would write an empty line.
        if bar.console.is_terminal:
            bar.start()
        bar.update(task, completed=there, total=total)

    try:
        yield show
    finally:
        # Stopping a bar that was never started prints an empty line.
        if bar.live.is_started:
            bar.stop()
