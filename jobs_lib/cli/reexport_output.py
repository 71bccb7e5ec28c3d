"""What the commands about re-exports print: plans, progress, and a bar."""

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
from jobs_lib.errors import ReexportError
from jobs_lib.operating.reexports import look_ahead

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


def print_begin(progress: Progress) -> None:
    begun = "resumed" if progress.loaded_ranges else "begun"
    click.echo(
        f"re-export {progress.id} of {progress.entity} {begun}: loading "
        f"{progress.ranges - progress.loaded_ranges} of {progress.ranges} ranges",
        err=True,
    )
    _print_lost(progress)


def once(function: Callable[[Progress], None]) -> Callable[[Progress], None]:
    called: list[int] = []

    def call_once(progress: Progress) -> None:
        if not called:
            called.append(progress.id)
            function(progress)

    return call_once


def load_and_print(
    database: Database,
    name: str,
    load: Callable[[], Progress],
    *,
    watch: bool,
    as_json: bool,
) -> None:
    """Load a re-export and print where it is; or show it up to its end before."""
    if watch:
        show_bar(database, name, in_background(load))
        progress = api.status(database, name)
    else:
        progress = load()
    print_progress(progress, as_json)


def in_background(load: Callable[[], object]) -> Callable[[], bool]:
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
        # In this order: it may fail and end between the lines.
        is_done = not thread.is_alive()
        if errors:
            raise errors[0]
        return is_done

    return loaded


def show_bar(database: Database, name: str, loaded: Callable[[], bool]) -> None:
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
            # Once it is loaded, there is one: without any it would wait for ever.
            progress = api.status(database, name) if done else _latest(database, name)
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


def print_plan(
    app: App,
    entity: Entity,
    rate: int | api.Window,
    ranges: int | None,
    as_json: bool,
    states: tuple[api.Range, ...] | None = None,
    topic: Topic[Any] | None = None,
) -> None:
    found = look_ahead(app, entity, rate, ranges, states, topic)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
        return
    planned, window = found.ranges, found.window
    click.echo(
        f"{found.total:,} keys of {found.keys} to {found.topic} in "
        f"{len(planned)} ranges"
    )
    for number, piece in enumerate(planned[:_SHOWN_RANGES]):
        lower, upper = piece.lower or "the first", piece.upper or "the end"
        click.echo(f"  range {number}: from {lower} up to {upper}: {piece.keys:,} keys")
    if len(planned) > _SHOWN_RANGES:
        click.echo(f"  and {len(planned) - _SHOWN_RANGES} more")
    if found.readers is not None:
        _print_readers(found.topic, found.readers)
    if window is not None:
        click.echo(
            f"the window {window.begin:%H:%M}-{window.end:%H:%M} has "
            f"{window.minutes:,.0f} minutes: --rate {found.rate}"
        )
    click.echo(
        f"at {found.rate:,} records a minute it takes {found.minutes:,.1f} minutes"
        f"{_until(found.ends)}; nothing was changed"
    )
    if states is None and topic is None:
        # To count them, the whole topic must be read.
        click.echo(
            "keys that only the topic has stay there, and are not counted: `jobs-lib "
            f"reexport stale {entity.name} --rate {found.rate} --dry-run` counts them"
        )


def _print_readers(topic: str, readers: Readers) -> None:
    for group, lag in readers.groups:
        click.echo(f"  read by {group}, which is {lag:,} records behind")
    if not readers.groups:
        click.echo(f"no group has committed an offset of {topic}")
    if readers.left_out:
        click.echo(
            f"  {readers.left_out:,} other groups were not asked, or gave no answer"
        )


def _print_lost(progress: Progress) -> None:
    if progress.snapshot is False:
        click.echo(
            "its snapshot ended with the loader that held it: the keys that were "
            "loaded since then are those of a later moment",
            err=True,
        )


def print_progress(progress: Progress, as_json: bool) -> None:
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
