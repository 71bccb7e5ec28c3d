"""The commands `jobs-lib reexport plan | start | status | list | rate | pause | …`."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from jobs_lib import reexport as api
from jobs_lib.app import load_app
from jobs_lib.cli.pack import pack, read_conf
from jobs_lib.cli.terminal import json_option, show
from jobs_lib.errors import ReexportError
from jobs_lib.operating.reexports import choose_rate, find_limit, look_ahead
from jobs_lib.reexport.run import CHUNK
from jobs_lib.reexport.snapshot import HOLD_SECONDS
from spark_bridge.engine import KEEP
from spark_bridge.engine import start as start_reexport
from spark_bridge.frames import FrameSource
from spark_bridge.repairs import start_move

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from jobs_lib.app import App
    from jobs_lib.kafka.lag import Readers
    from jobs_lib.outbox.topic import Entity, Topic
    from jobs_lib.postgres.database import Database
    from jobs_lib.reexport import Progress

_WATCH_SECONDS = 0.5
_SHOWN_RANGES = 10
_LISTED = (
    "id", "entity", "state", "rate", "total", "sent", "superseded", "started_at",
    "eta", "finished_at",
)  # fmt: skip

_app = click.option(
    "--app",
    "path",
    metavar="MODULE:APP",
    envvar="JOBS_LIB_APP",
    required=True,
    help="The app that declares the entity. Also JOBS_LIB_APP.",
)
_entity = click.argument("name", metavar="ENTITY")
_rate = click.option("--rate", type=int, help="Records a minute.")
_window = click.option(
    "--window",
    metavar="HH:MM-HH:MM",
    help="Instead of a rate: hours of the day in which all keys are to be sent.",
)
_tz = click.option("--tz", help="Time zone of the window. Defaults to this machine's.")
_ranges = click.option(
    "--ranges", type=int, help="Defaults to one for each 10,000 keys."
)


@click.group()
def reexport() -> None:
    """Send the current states of an entity again, at a rate."""


reexport.add_command(pack)


@reexport.command()
@_entity
@_app
@_rate
@_window
@_tz
@_ranges
@json_option
def plan(
    name: str,
    path: str,
    rate: int | None,
    window: str | None,
    tz: str | None,
    ranges: int | None,
    as_json: bool,
) -> None:
    """Show the ranges, the rate, the end, and who reads the topic; change nothing."""
    app, entity = _find(path, name)
    _print_plan(app, entity, choose_rate(rate, window, tz), ranges, as_json)


@reexport.command()
@_entity
@_app
@_rate
@_window
@_tz
@click.option(
    "--engine",
    type=click.Choice(["spark", "sql"]),
    default="spark",
    show_default=True,
    help="Load the keys by Spark, or by this process alone.",
)
@click.option("--master", help="Spark's master. Defaults to this machine.")
@click.option(
    "--conf",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of Spark; may be given more than once.",
)
@click.option(
    "--packed",
    metavar="FILE",
    help="Send this file to the workers; `reexport pack` makes it.",
)
@click.option(
    "--keep",
    type=click.FloatRange(min=0),
    default=KEEP,
    show_default=True,
    metavar="SECONDS",
    help="Keep Spark for so long while nothing is to be loaded.",
)
@_ranges
@click.option(
    "--chunk", type=int, default=CHUNK, show_default=True, help="Keys in one job."
)
@click.option(
    "--watch-lag",
    "limit",
    metavar="GROUP:RECORDS",
    help="Pause while this group of the topic is further behind.",
)
@click.option(
    "--snapshot", is_flag=True, help="Load the keys that the table has at one moment."
)
@click.option(
    "--hold-for",
    type=float,
    default=HOLD_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Hold the snapshot for so long, at most.",
)
@click.option("--topic", help="Fill this new topic, and feed both until `switch`.")
@click.option(
    "--parquet",
    metavar="PATH",
    help="Take the states from these files, with key, version and state.",
)
@click.option("--csv", metavar="PATH", help="The same from CSV with a line of names.")
@click.option("--dry-run", is_flag=True, help="As `plan`.")
@click.option("--watch", is_flag=True, help="Show the progress until the end.")
@json_option
def start(
    name: str,
    path: str,
    rate: int | None,
    window: str | None,
    tz: str | None,
    engine: str,
    master: str | None,
    conf: tuple[str, ...],
    packed: str | None,
    keep: float,
    ranges: int | None,
    chunk: int,
    limit: str | None,
    snapshot: bool,
    hold_for: float,
    topic: str | None,
    parquet: str | None,
    csv: str | None,
    dry_run: bool,
    watch: bool,
    as_json: bool,
) -> None:
    """Begin a re-export, or continue one that was interrupted."""
    app, entity = _find(path, name)
    chosen = choose_rate(rate, window, tz)
    frame = _find_frame(parquet, csv, dry_run=dry_run)
    watched = None if limit is None else find_limit(app, entity, limit)
    if dry_run:
        _print_plan(app, entity, chosen, ranges, as_json)
        return
    database = app.database()
    goal = None if topic is None else _find_topic(app, path, topic)
    if goal is not None and (frame is not None or snapshot or ranges is not None):
        raise ReexportError(
            "--topic fills a new topic from the table: leave --parquet, --csv, "
            "--snapshot and --ranges out"
        )
    settings = read_conf(conf)

    def load() -> Progress:
        if goal is not None:
            return start_move(
                database,
                app.settings,
                entity,
                goal,
                rate=chosen,
                engine="sql" if engine == "sql" else "spark",
                master=master,
                chunk=chunk,
                watch_lag=watched,
            )
        return start_reexport(
            database,
            entity,
            rate=chosen,
            engine="sql" if engine == "sql" else "spark",
            master=master,
            keep=keep,
            ranges=ranges,
            chunk=chunk,
            watch_lag=watched,
            snapshot=snapshot,
            hold_for=hold_for,
            on_progress=None if as_json else _once(_print_begin),
            frame=frame,
            settings=settings,
            packed=packed,
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
@json_option
def status(name: str, path: str, watch: bool, as_json: bool) -> None:
    """Show the progress of the latest re-export."""
    database = _database(path, name)
    if watch:
        _show(database, name, lambda: True)
    _print(api.status(database, name), as_json)


@reexport.command("list")
@_app
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=50,
    show_default=True,
    help="How many at most.",
)
@json_option
def list_all(path: str, limit: int, as_json: bool) -> None:
    """List the latest re-exports of all entities, newest first."""
    found = api.list_latest(load_app(path).database(), limit)
    fields = [one.name for one in dataclasses.fields(api.Progress)]
    columns = fields if as_json else _LISTED
    rows = [tuple(getattr(one, name) for name in columns) for one in found]
    show(columns, rows, as_json)


@reexport.command("watch-lag")
@_entity
@click.argument("limit", metavar="GROUP:RECORDS|off")
@_app
@json_option
def watch_lag(name: str, limit: str, path: str, as_json: bool) -> None:
    """Pause it while a group that reads its topic is further behind than this."""
    app, entity = _find(path, name)
    watched = None if limit == "off" else find_limit(app, entity, limit)
    _print(api.watch_lag(app.database(), name, watched), as_json)


@reexport.command()
@_entity
@click.argument("records", type=int, metavar="RATE")
@_app
@json_option
def rate(name: str, records: int, path: str, as_json: bool) -> None:
    """Change the rate, in records a minute."""
    _print(api.set_rate(_database(path, name), name, records), as_json)


@reexport.command()
@_entity
@_app
@json_option
def pause(name: str, path: str, as_json: bool) -> None:
    """Stop sending records until the re-export is resumed."""
    _print(api.pause(_database(path, name), name), as_json)


@reexport.command()
@_entity
@_app
@json_option
def resume(name: str, path: str, as_json: bool) -> None:
    """Continue after a pause, without a burst."""
    _print(api.resume(_database(path, name), name), as_json)


@reexport.command()
@_entity
@_app
@json_option
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


def _find_topic(app: App, path: str, name: str) -> Topic[Any]:
    found = [one for one in app.topics.values() if name in (one.declared, one.name)]
    if not found:
        known = ", ".join(sorted(one.declared for one in app.topics.values()))
        raise ReexportError(
            f"{path} declares no topic {name!r} (declared: {known}): declare it with "
            "app.topic"
        )
    return found[0]


def _find_frame(
    parquet: str | None, csv: str | None, *, dry_run: bool
) -> FrameSource | None:
    """The files that the options name; None for the entity's table."""
    if parquet is None and csv is None:
        return None
    if parquet is not None and csv is not None:
        raise ReexportError("the states have one source: either --parquet or --csv")
    if dry_run:
        raise ReexportError(
            "--dry-run plans the entity's table: without it, files are examined as a "
            "whole before anything begins"
        )
    if parquet is not None:
        return FrameSource.parquet(parquet)
    assert csv is not None
    return FrameSource.csv(csv)


def _print_begin(progress: Progress) -> None:
    begun = "resumed" if progress.loaded_ranges else "begun"
    click.echo(
        f"re-export {progress.id} of {progress.entity} {begun}: loading "
        f"{progress.ranges - progress.loaded_ranges} of {progress.ranges} ranges",
        err=True,
    )
    _print_lost(progress)


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
        return f"loading {loaded}, {_pace(progress)}"
    return f"{progress.state}, {_pace(progress)}"


def _pace(progress: Progress) -> str:
    measured = ""
    if progress.measured is not None:
        measured = f", measured {progress.measured:,}/min"
    return f"{progress.rate:,}/min{measured}{_until(progress.eta)}"


def _until(eta: datetime | None) -> str:
    return f", ends {eta.astimezone():%Y-%m-%d %H:%M}" if eta else ""


def _print_plan(
    app: App,
    entity: Entity,
    rate: int | api.Window,
    ranges: int | None,
    as_json: bool,
) -> None:
    found = look_ahead(app, entity, rate, ranges)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
        return
    plan, window = found.plan, found.window
    click.echo(
        f"{plan.total:,} keys of {entity.source}.{', '.join(entity.columns)} "
        f"({', '.join(plan.source.types)}) to "
        f"{entity.topic.name} in {len(plan.ranges)} ranges"
    )
    for number, piece in enumerate(plan.ranges[:_SHOWN_RANGES]):
        lower, upper = piece.lower or "the first", piece.upper or "the end"
        click.echo(f"  range {number}: from {lower} up to {upper}: {piece.keys:,} keys")
    if len(plan.ranges) > _SHOWN_RANGES:
        click.echo(f"  and {len(plan.ranges) - _SHOWN_RANGES} more")
    if found.readers is not None:
        _print_readers(entity.topic.name, found.readers)
    if window is not None:
        click.echo(
            f"the window {window.begin:%H:%M}-{window.end:%H:%M} has "
            f"{window.minutes:,.0f} minutes: --rate {found.rate}"
        )
    click.echo(
        f"at {found.rate:,} records a minute it takes {found.minutes:,.1f} minutes"
        f"{_until(found.ends)}; nothing was changed"
    )


def _print_readers(topic: str, readers: Readers) -> None:
    for group, lag in readers.groups:
        click.echo(f"  read by {group}, which is {lag:,} records behind")
    if not readers.groups:
        click.echo(f"no group has committed an offset of {topic}")
    if readers.left_out:
        click.echo(f"  {readers.left_out:,} other groups were not asked")


def _print_lost(progress: Progress) -> None:
    if progress.snapshot is False:
        click.echo(
            "its snapshot ended with the loader that held it: the keys that were "
            "loaded since then are those of a later moment",
            err=True,
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
    if progress.measured is not None:
        click.echo(f"measured: {progress.measured:,} records a minute")
    _print_lost(progress)
    if progress.lag_group is not None:
        known = "not known yet" if progress.lag is None else f"{progress.lag:,}"
        click.echo(
            f"the lag of {progress.lag_group} is {known}; above "
            f"{progress.lag_limit:,} it is paused"
        )
    if progress.lagging:
        click.echo("it is paused because of that lag, and goes on at half of it")
    elif progress.state == "paused":
        click.echo(f"it is paused: jobs-lib reexport resume {progress.entity}")
