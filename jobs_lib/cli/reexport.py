"""The commands `jobs-lib reexport plan | start | status | list | rate | pause | …`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import click

from jobs_lib import reexport as api
from jobs_lib.app import load_app
from jobs_lib.cli.options import FiniteRange
from jobs_lib.cli.pack import pack
from jobs_lib.cli.reexport_options import (
    SparkOptions,
    app_option,
    chunk_option,
    engine_option,
    entity_argument,
    file_options,
    find_database,
    find_entity,
    find_frame,
    find_topic,
    keep_option,
    lag_option,
    pace_options,
    ranges_option,
    spark_options,
    watch_option,
)
from jobs_lib.cli.reexport_output import (
    load_and_print,
    once,
    print_begin,
    print_plan,
    print_progress,
    show_bar,
)
from jobs_lib.cli.terminal import json_option, show
from jobs_lib.errors import ReexportError
from jobs_lib.operating.reexports import choose_rate, find_limit, find_open_topic
from jobs_lib.reexport.snapshot import HOLD_SECONDS
from spark_bridge.engine import examine
from spark_bridge.engine import start as start_reexport
from spark_bridge.repairs import start_move

if TYPE_CHECKING:
    from jobs_lib.app import App
    from jobs_lib.outbox.topic import Entity
    from jobs_lib.reexport import Progress
    from spark_bridge.frames import FrameSource

_LISTED = (
    "id", "entity", "state", "rate", "total", "sent", "superseded", "started_at",
    "eta", "finished_at",
)  # fmt: skip


@click.group()
def reexport() -> None:
    """Send the current states of an entity again, at a rate."""


reexport.add_command(pack)


@reexport.command()
@entity_argument
@app_option
@pace_options
@spark_options
@ranges_option
@file_options
@json_option
def plan(
    name: str,
    path: str,
    rate: int | None,
    window: str | None,
    tz: str | None,
    spark: SparkOptions,
    ranges: int | None,
    parquet: str | None,
    csv: str | None,
    as_json: bool,
) -> None:
    """Show the ranges, the rate, the end, and who reads the topic; change nothing.

    Files are examined as a whole, as `start` would do it.
    """
    app, entity = find_entity(path, name)
    chosen = choose_rate(rate, window, tz)
    frame = find_frame(parquet, csv)
    if frame is None and any(spark.values()):
        raise ReexportError(
            "a plan of the entity's table starts no Spark: leave --master, --conf and "
            "--packed out, or give --parquet or --csv"
        )
    states = _examine(app, entity, frame, ranges, spark)
    print_plan(app, entity, chosen, ranges, as_json, states)


@reexport.command()
@entity_argument
@app_option
@pace_options
@engine_option("Load the keys by Spark, or by this process alone.")
@spark_options
@keep_option
@ranges_option
@chunk_option
@lag_option
@click.option(
    "--snapshot", is_flag=True, help="Load the keys that the table has at one moment."
)
@click.option(
    "--hold-for",
    type=FiniteRange(),
    default=HOLD_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Hold the snapshot for so long, at most.",
)
@click.option("--topic", help="Fill this new topic, and feed both until `switch`.")
@file_options
@click.option("--dry-run", is_flag=True, help="As `plan`.")
@watch_option
@json_option
def start(
    name: str,
    path: str,
    rate: int | None,
    window: str | None,
    tz: str | None,
    engine: Literal["spark", "sql"],
    spark: SparkOptions,
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
    app, entity = find_entity(path, name)
    chosen = choose_rate(rate, window, tz)
    frame = find_frame(parquet, csv)
    goal = None if topic is None else find_topic(app, path, topic)
    if frame is not None and engine == "sql":
        raise ReexportError(
            "only Spark reads a DataFrame: leave `sql` out as the engine"
        )
    if goal is not None and (frame is not None or snapshot or ranges is not None):
        raise ReexportError(
            "--topic fills a new topic from the table: leave --parquet, --csv, "
            "--snapshot and --ranges out"
        )
    # The relays ask for the lag at the topic that the re-export goes to.
    read = (goal or entity.topic).name
    watched = None if limit is None else find_limit(app, read, limit)
    if dry_run:
        states = _examine(app, entity, frame, ranges, spark)
        print_plan(app, entity, chosen, ranges, as_json, states, goal)
        return
    database = app.database()

    def load() -> Progress:
        if goal is not None:
            return start_move(
                database,
                app.settings,
                entity,
                goal,
                rate=chosen,
                engine=engine,
                keep=keep,
                chunk=chunk,
                watch_lag=watched,
                **spark,
            )
        return start_reexport(
            database,
            entity,
            rate=chosen,
            engine=engine,
            keep=keep,
            ranges=ranges,
            chunk=chunk,
            watch_lag=watched,
            snapshot=snapshot,
            hold_for=hold_for,
            on_progress=None if as_json else once(print_begin),
            frame=frame,
            **spark,
        )

    load_and_print(database, name, load, watch=watch, as_json=as_json)


def _examine(
    app: App,
    entity: Entity,
    frame: FrameSource | None,
    ranges: int | None,
    spark: SparkOptions,
) -> tuple[api.Range, ...] | None:
    if frame is None:
        return None
    return examine(app.database(), entity, frame, ranges=ranges, **spark)


@reexport.command()
@entity_argument
@app_option
@watch_option
@json_option
def status(name: str, path: str, watch: bool, as_json: bool) -> None:
    """Show the progress of the latest re-export."""
    database = find_database(path, name)
    if watch:
        show_bar(database, name, lambda: True)
    print_progress(api.status(database, name), as_json)


@reexport.command("list")
@app_option
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
@entity_argument
@click.argument("limit", metavar="GROUP:RECORDS|off")
@app_option
@json_option
def watch_lag(name: str, limit: str, path: str, as_json: bool) -> None:
    """Pause it while a group that reads its topic is further behind than this."""
    app, entity = find_entity(path, name)
    watched = None
    if limit != "off":
        watched = find_limit(app, find_open_topic(app, entity), limit)
    print_progress(api.watch_lag(app.database(), name, watched), as_json)


@reexport.command()
@entity_argument
@click.argument("records", type=int, metavar="RATE")
@app_option
@json_option
def rate(name: str, records: int, path: str, as_json: bool) -> None:
    """Change the rate, in records a minute."""
    print_progress(api.set_rate(find_database(path, name), name, records), as_json)


@reexport.command()
@entity_argument
@app_option
@json_option
def pause(name: str, path: str, as_json: bool) -> None:
    """Stop sending records until the re-export is resumed."""
    print_progress(api.pause(find_database(path, name), name), as_json)


@reexport.command()
@entity_argument
@app_option
@json_option
def resume(name: str, path: str, as_json: bool) -> None:
    """Continue after a pause, without a burst."""
    print_progress(api.resume(find_database(path, name), name), as_json)


@reexport.command()
@entity_argument
@app_option
@json_option
def cancel(name: str, path: str, as_json: bool) -> None:
    """End the re-export for good."""
    print_progress(api.cancel(find_database(path, name), name), as_json)
