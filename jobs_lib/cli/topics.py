"""The commands `jobs-lib topics …`."""

from __future__ import annotations

import sys
from dataclasses import astuple, fields
from typing import TYPE_CHECKING

import click

from jobs_lib.app import load_app
from jobs_lib.cli.options import COUNTS, FiniteRange, app_argument, wait_option
from jobs_lib.cli.terminal import json_option, show

if TYPE_CHECKING:
    from jobs_lib.operating.topics import Change


@click.group()
def topics() -> None:
    """The topics of a service."""


@topics.command("plan")
@app_argument
@json_option
def topics_plan(app: str, as_json: bool) -> None:
    """Show where the topics in Kafka differ from the declared ones."""
    from jobs_lib.operating.topics import plan_topics

    _show_changes(plan_topics(load_app(app)), as_json)


@topics.command("apply")
@app_argument
@json_option
def topics_apply(app: str, as_json: bool) -> None:
    """Create topics and set them as declared; never change their partitions.

    Exits with 1 if a topic has another number of partitions than declared.
    """
    from jobs_lib.operating.topics import apply_topics, explain_left

    changes = apply_topics(load_app(app))
    _show_changes(changes, as_json)
    for line in explain_left(changes):
        click.echo(f"not applied: {line}", err=True)
    sys.exit(0 if all(change.applies for change in changes) else 1)


@topics.command("check")
@app_argument
@json_option
def topics_check(app: str, as_json: bool) -> None:
    """Exit with 1 if the topics in Kafka differ from the declared ones."""
    from jobs_lib.operating.topics import plan_topics

    changes = plan_topics(load_app(app))
    _show_changes(changes, as_json)
    sys.exit(1 if changes else 0)


def _show_changes(changes: list[Change], as_json: bool) -> None:
    columns = ("topic", "what", "found", "wanted", "applies")
    show(columns, (astuple(change) for change in changes), as_json)


@topics.command("grow")
@app_argument
@click.argument("topic")
@click.option(
    "--partitions",
    type=COUNTS,
    required=True,
    help="How many it will have.",
)
@click.option(
    "--group",
    "groups",
    multiple=True,
    help="A group of another app that reads it, by its name in Kafka; repeat it.",
)
@click.option(
    "--timeout",
    "seconds",
    type=FiniteRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that publishers are stopped at most.",
)
@click.option(
    "--publish-timeout",
    type=FiniteRange(0, min_open=True),
    help="The longest JOBS_LIB_PUBLISH_TIMEOUT of the processes that publish to it, if "
    "those with a longer one have ended.",
)
def topics_grow(
    app: str,
    topic: str,
    partitions: int,
    groups: tuple[str, ...],
    seconds: float,
    publish_timeout: float | None,
) -> None:
    """Add partitions to the stream TOPIC; each key keeps its order.

    Publishes wait while the groups that read it handle what it has. If they do not in
    time, nothing has changed.
    """
    from jobs_lib.operating.growth import explain_growth, grow

    loaded = load_app(app)
    stopped = grow(
        loaded,
        topic,
        partitions,
        groups=groups,
        seconds=seconds,
        publish_timeout=publish_timeout,
        tell=lambda text: click.echo(text, err=True),
    )
    click.echo(
        f"{topic} has {partitions} partitions; publishers were stopped for "
        f"{stopped:.1f} s"
    )
    for line in explain_growth(loaded, topic, partitions):
        click.echo(f"to do: {line}", err=True)


@topics.command("status")
@app_argument
@json_option
def topics_status(app: str, as_json: bool) -> None:
    """Show the streams whose publishers are stopped by `topics grow`."""
    from jobs_lib.operating.growth import Stopped, list_stopped

    columns = [one.name for one in fields(Stopped)]
    show(columns, map(astuple, list_stopped(load_app(app))), as_json)


@topics.command("declare")
@app_argument
@click.argument("topic")
@click.option("--partitions", type=COUNTS, help="Default: Kafka's.")
@click.option(
    "--home",
    is_flag=True,
    help="Groups get their origins from it, and their waiting jobs move there.",
)
@wait_option
def topics_declare(
    app: str, topic: str, partitions: int | None, home: bool, wait: float
) -> None:
    """Record how many partitions of TOPIC are origins of jobs."""
    from jobs_lib.operating.home_topic import declare_topic

    moved = declare_topic(
        load_app(app), topic, home=home, move=True, partitions=partitions, wait=wait
    )
    click.echo(f"declared: {topic}" + (f"; {moved} jobs moved" if moved else ""))


@topics.command("repartition")
@app_argument
@click.argument("partitions", type=COUNTS)
@wait_option
def topics_repartition(app: str, partitions: int, wait: float) -> None:
    """Let groups use this many PARTITIONS of the home topic, and move their jobs."""
    from jobs_lib.operating.home_topic import repartition

    moved = repartition(load_app(app), partitions, wait=wait)
    click.echo(f"groups use {partitions} partitions now; {moved} jobs moved")
