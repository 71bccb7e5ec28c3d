"""The commands `jobs-lib reexport stale | rebuild | switch`; see their group."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

import click

from jobs_lib import reexport as api
from jobs_lib.cli.reexport import reexport
from jobs_lib.cli.reexport_options import (
    SparkOptions,
    app_option,
    chunk_option,
    engine_option,
    entity_argument,
    find_entity,
    find_topic,
    keep_option,
    lag_option,
    pace_options,
    spark_options,
    watch_option,
)
from jobs_lib.cli.reexport_output import load_and_print
from jobs_lib.cli.terminal import json_option
from jobs_lib.operating.reexports import choose_rate, find_limit
from jobs_lib.reexport.control import REACHED
from jobs_lib.reexport.move import end_move
from spark_bridge.repairs import choose_finder, start_rebuild, start_stale

if TYPE_CHECKING:
    from jobs_lib.app import App
    from jobs_lib.outbox.topic import Entity
    from jobs_lib.reexport import Finder, Progress, Window


@reexport.command()
@entity_argument
@app_option
@pace_options
@engine_option("Compare by Spark, or by this process and the database.")
@spark_options
@chunk_option
@lag_option
@click.option("--dry-run", is_flag=True, help="Count the keys; change nothing.")
@watch_option
@json_option
def stale(
    name: str,
    path: str,
    rate: int | None,
    window: str | None,
    tz: str | None,
    engine: Literal["spark", "sql"],
    spark: SparkOptions,
    chunk: int,
    limit: str | None,
    dry_run: bool,
    watch: bool,
    as_json: bool,
) -> None:
    """Send tombstones for keys that the topic has and the table has not."""
    app, entity = find_entity(path, name)
    chosen = choose_rate(rate, window, tz)
    watched = None if limit is None else find_limit(app, entity.topic.name, limit)
    if dry_run:
        _print_count(app, entity, chosen, choose_finder(engine, **spark), as_json)
        return
    database = app.database()

    def load() -> Progress:
        return start_stale(
            database,
            app.settings,
            entity,
            rate=chosen,
            engine=engine,
            chunk=chunk,
            watch_lag=watched,
            **spark,
        )

    load_and_print(database, name, load, watch=watch, as_json=as_json)


@reexport.command()
@entity_argument
@app_option
@pace_options
@engine_option("Load the keys by Spark, or by this process alone.")
@spark_options
@keep_option
@click.option(
    "--although-behind",
    is_flag=True,
    help="Also delete records that a group has not read yet.",
)
@watch_option
@click.confirmation_option("--yes", prompt="Delete all records of the topic?")
@json_option
def rebuild(
    name: str,
    path: str,
    rate: int | None,
    window: str | None,
    tz: str | None,
    engine: Literal["spark", "sql"],
    spark: SparkOptions,
    keep: float,
    although_behind: bool,
    watch: bool,
    as_json: bool,
) -> None:
    """Delete what the topic has, and send all states again; or go on with that."""
    app, entity = find_entity(path, name)
    chosen = choose_rate(rate, window, tz)
    database = app.database()

    def load() -> Progress:
        return start_rebuild(
            database,
            app.settings,
            entity,
            rate=chosen,
            engine=engine,
            keep=keep,
            although_behind=although_behind,
            **spark,
        )

    load_and_print(database, name, load, watch=watch, as_json=as_json)


@reexport.command()
@entity_argument
@click.argument("topic")
@app_option
@click.option(
    "--give-up", is_flag=True, help="End it although the new topic is not complete."
)
def switch(name: str, topic: str, path: str, give_up: bool) -> None:
    """End the feeding of a new topic: services write to it themselves now."""
    app, entity = find_entity(path, name)
    goal = find_topic(app, path, topic)
    former = end_move(app.database(), entity, goal, give_up=give_up)
    told = (
        "changes are missing there from now on, so delete it before you fill it again"
        if give_up
        else "nothing that was sent is missing there"
    )
    click.echo(f"{former} feeds {topic} no more: {told}")


def _print_count(
    app: App, entity: Entity, rate: int | Window, finder: Finder, as_json: bool
) -> None:
    topic = entity.topic.name
    api.check_topic(app.settings, entity)
    with finder.find(app.database(), app.settings, entity) as found:
        count, unreadable = found.count, found.unreadable
    if not isinstance(rate, int):
        rate = api.find_rate(count, api.find_span(rate))
    minutes = count / (rate * REACHED)
    if as_json:
        shown = {"entity": entity.name, "topic": topic, "stale": count}
        click.echo(json.dumps(shown | {"unreadable": unreadable, "rate": rate}))
        return
    click.echo(
        f"{count:,} keys of {topic} are not in {entity.source}: at "
        f"{rate:,} records a minute it takes {minutes:,.1f} minutes to remove them; "
        "nothing was changed"
    )
    if unreadable:
        click.echo(
            f"{unreadable:,} records stay, since no row of the outbox could have their "
            "keys"
        )
