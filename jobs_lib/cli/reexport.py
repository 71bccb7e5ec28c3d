"""The commands `jobs-lib reexport start | status | rate | pause | resume | cancel`."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from jobs_lib import reexport as api
from jobs_lib.app import load_app
from jobs_lib.errors import ReexportError
from jobs_lib.reexport.control import check_rate
from jobs_lib.reexport.run import CHUNK
from spark_bridge.engine import start as start_reexport

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.app import App
    from jobs_lib.outbox.topic import Entity
    from jobs_lib.postgres.database import Database
    from jobs_lib.reexport import Plan, Progress

_WATCH_SECONDS = 0.5
_SHOWN_RANGES = 10

_app = click.option(
    "--app",
    "path",
    metavar="MODULE:APP",
    envvar="JOBS_LIB_APP",
    required=True,
    help="The app that declares the entity. Also JOBS_LIB_APP.",
)
_entity = click.argument("name", metavar="ENTITY")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def reexport() -> None:
    """Send the current states of an entity again, at a rate."""


@reexport.command()
@_entity
@_app
@click.option("--rate", type=int, required=True, help="Records a minute.")
@click.option(
    "--engine",
    type=click.Choice(["spark", "sql"]),
    default="spark",
    show_default=True,
    help="Load the keys by Spark, or by this process alone.",
)
@click.option("--master", help="Spark's master. Defaults to this machine.")
@click.option("--ranges", type=int, help="Defaults to one for each 10,000 keys.")
@click.option(
    "--chunk", type=int, default=CHUNK, show_default=True, help="Keys in one job."
)
@click.option("--dry-run", is_flag=True, help="Print the plan and change nothing.")
@click.option("--watch", is_flag=True, help="Show the progress until the end.")
@_json
def start(
    name: str,
    path: str,
    rate: int,
    engine: str,
    master: str | None,
    ranges: int | None,
    chunk: int,
    dry_run: bool,
    watch: bool,
    as_json: bool,
) -> None:
    """Begin a re-export, or continue one that was interrupted."""
    app, entity = _find(path, name)
    database = app.database()
    if dry_run:
        with database.connect("re-export plan") as connection:
            plan = api.plan_ranges(connection, database.queries, entity, ranges)
        _print_plan(entity, plan, check_rate(rate), as_json)
        return

    def load() -> Progress:
        return start_reexport(
            database,
            entity,
            rate=rate,
            engine="sql" if engine == "sql" else "spark",
            master=master,
            ranges=ranges,
            chunk=chunk,
            on_progress=None if as_json else _once(_print_begin),
        )

    if watch:
        _show(database, name, _in_background(load))
        progress = api.status(database, name)
    else:
        progress = load()
    _print(progress, as_json)


@reexport.command()
@_entity
@_app
@click.option("--watch", is_flag=True, help="Show the progress until the end.")
@_json
def status(name: str, path: str, watch: bool, as_json: bool) -> None:
    """Show the progress of the latest re-export."""
    database = _database(path, name)
    if watch:
        _show(database, name, lambda: True)
    _print(api.status(database, name), as_json)


@reexport.command()
@_entity
@click.argument("records", type=int, metavar="RATE")
@_app
@_json
def rate(name: str, records: int, path: str, as_json: bool) -> None:
    """Change the rate, in records a minute."""
    _print(api.set_rate(_database(path, name), name, records), as_json)


@reexport.command()
@_entity
@_app
@_json
def pause(name: str, path: str, as_json: bool) -> None:
    """Stop sending records until the re-export is resumed."""
    _print(api.pause(_database(path, name), name), as_json)


@reexport.command()
@_entity
@_app
@_json
def resume(name: str, path: str, as_json: bool) -> None:
    """Continue after a pause, without a burst."""
    _print(api.resume(_database(path, name), name), as_json)


@reexport.command()
@_entity
@_app
@_json
def cancel(name: str, path: str, as_json: bool) -> None:
    """End the re-export for good."""
    _print(api.cancel(_database(path, name), name), as_json)


def _find(path: str, name: str) -> tuple[App, Entity]:
    app = load_app(path)
    if name not in app.entities:
        known = ", ".join(sorted(app.entities)) or "none"
        raise ReexportError(
            f"{path} declares no entity {name!r} (declared: {known}): declare it with "
            "@app.entity"
        )
    return app, app.entities[name]


def _database(path: str, name: str) -> Database:
    return _find(path, name)[0].database()


def _print_begin(progress: Progress) -> None:
    begun = "resumed" if progress.loaded_ranges else "begun"
    click.echo(
        f"re-export {progress.id} of {progress.entity} {begun}: loading "
        f"{progress.ranges - progress.loaded_ranges} of {progress.ranges} ranges",
        err=True,
    )


def _once(function: Callable[[Progress], None]) -> Callable[[Progress], None]:
    called: list[int] = []

    def call_once(progress: Progress) -> None:
        if not called:
            called.append(progress.id)
            function(progress)

    return call_once


def _in_background(load: Callable[[], object]) -> Callable[[], bool]:
    """Load in a thread; the returned function says whether it is done, or raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            load()
        except BaseException as error:
            errors.append(error)

    # A daemon: an interrupted command ends at once, and the next start continues.
    thread = threading.Thread(target=run, name="re-export", daemon=True)
    thread.start()

    def loaded() -> bool:
        if errors:
            raise errors[0]
        return not thread.is_alive()

    return loaded


def _show(database: Database, name: str, loaded: Callable[[], bool]) -> None:
    """Show a bar until everything is loaded and the re-export has ended."""
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} / {task.total:,.0f}"),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task(name, total=0, note="planning")
        while True:
            done = loaded()
            progress = _latest(database, name)
            if progress is not None:
                completed = progress.sent + progress.superseded
                note = _note(progress)
                bar.update(task, total=progress.total, completed=completed, note=note)
                if done and progress.ended:
                    return
            time.sleep(_WATCH_SECONDS)


def _latest(database: Database, name: str) -> Progress | None:
    try:
        return api.status(database, name)
    except ReexportError:
        return None  # not yet planned


def _note(progress: Progress) -> str:
    if progress.state == "loading":
        loaded = f"{progress.loaded_ranges}/{progress.ranges} ranges"
        return f"loading {loaded}, {progress.rate:,}/min{_until(progress.eta)}"
    return f"{progress.state}, {progress.rate:,}/min{_until(progress.eta)}"


def _until(eta: datetime | None) -> str:
    return f", ends {eta.astimezone():%Y-%m-%d %H:%M}" if eta else ""


def _print_plan(entity: Entity, plan: Plan, rate: int, as_json: bool) -> None:
    minutes = plan.total / (rate * 0.975)
    ends = datetime.now(UTC) + timedelta(minutes=minutes)
    if as_json:
        ranges = [dataclasses.asdict(piece) for piece in plan.ranges]
        shown = {"entity": entity.name, "topic": entity.topic.name, "rate": rate}
        shown |= {"total": plan.total, "eta": ends.isoformat(), "ranges": ranges}
        click.echo(json.dumps(shown))
        return
    click.echo(
        f"{plan.total:,} keys of {entity.source}.{entity.key} ({plan.source.type}) to "
        f"{entity.topic.name} in {len(plan.ranges)} ranges"
    )
    for number, piece in enumerate(plan.ranges[:_SHOWN_RANGES]):
        lower, upper = piece.lower or "the first", piece.upper or "the end"
        click.echo(f"  range {number}: from {lower} up to {upper}: {piece.keys:,} keys")
    if len(plan.ranges) > _SHOWN_RANGES:
        click.echo(f"  and {len(plan.ranges) - _SHOWN_RANGES} more")
    click.echo(
        f"at {rate:,} records a minute it takes {minutes:,.1f} minutes{_until(ends)}; "
        "nothing was changed"
    )


def _print(progress: Progress, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(progress), default=str))
        return
    click.echo(
        f"re-export {progress.id} of {progress.entity}: {progress.state}, "
        f"{progress.sent:,} sent and {progress.superseded:,} superseded of "
        f"{progress.total:,}, {progress.loaded_ranges} of {progress.ranges} ranges "
        f"loaded, {progress.rate:,} records a minute{_until(progress.eta)}"
    )
    if progress.state == "paused":
        click.echo(f"it is paused: jobs-lib reexport resume {progress.entity}")
