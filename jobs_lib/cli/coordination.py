"""The commands `jobs-lib coordination …`. They need no database."""

from __future__ import annotations

import sys
from dataclasses import asdict, astuple, fields
from typing import TYPE_CHECKING, Any

import click

from jobs_lib.cli.options import PARTITIONS, FiniteRange, read_duration, read_time
from jobs_lib.cli.terminal import json_option, printable, show, show_json, watch
from jobs_lib.errors import ConfigurationError, OperatingError, UnavailableError
from jobs_lib.settings import default_settings, require_bootstrap_servers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime, timedelta

    from jobs_lib.operating.coordination import Holder, View, Viewer
    from jobs_lib.operating.coordination.positions import Place
    from jobs_lib.settings import Settings

_log_option = click.option(
    "--log",
    metavar="TOPIC",
    help="The coordination log's name in Kafka. Defaults to "
    "JOBS_LIB_COORDINATION_TOPIC.",
)
_wait_option = click.option(
    "--wait",
    type=FiniteRange(0, 3_600),
    default=60.0,
    show_default=True,
    help="Seconds to wait until nobody holds a partition.",
)
_group_argument = click.argument("group")
_DIGITS = 19
"""Of the largest offset."""
_ENDS: dict[str, Place] = {"earliest": "earliest", "latest": "latest"}


def _read_place(
    context: click.Context, option: click.Parameter, value: str
) -> Place | None:
    """Read where a group goes on; the callback of an option."""
    if value in _ENDS:
        return _ENDS[value]
    if value.isascii() and value.isdecimal() and len(value) <= _DIGITS:
        return int(value)
    return read_time(context, option, value)


@click.group()
def coordination() -> None:
    """Show and steer groups that share partitions over a topic."""


@coordination.command("show")
@_log_option
@click.option("--group", help="Only this group.")
@click.option(
    "--watch",
    "seconds",
    type=FiniteRange(0.1),
    help="Show them again after this many seconds, until Ctrl-C.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Fold the whole log instead, and compare it with its last snapshots.",
)
@json_option
def coordination_show(
    log: str | None,
    group: str | None,
    seconds: float | None,
    verify: bool,
    as_json: bool,
) -> None:
    """Show who holds each partition of each group, how far it is, and the pauses.

    With --verify it exits with 1 if a snapshot says something else than the log.
    """
    settings, topic = _find_log(log)
    if verify:
        if seconds is not None or group is not None:
            raise OperatingError("--verify reads all once: leave the other options out")
        _verify(settings, topic, as_json)
        return
    if seconds is not None and as_json:
        raise OperatingError("--json prints once: leave --watch out")
    from jobs_lib.operating.coordination import SharedPart, Viewer

    columns = [one.name for one in fields(SharedPart)]
    with Viewer(settings, topic, group) as viewer:
        view = viewer.look()
        if as_json:
            show_json(asdict(view))
        elif seconds is None:
            for line in _explain_view(view):
                click.echo(line, err=True)
            show(columns, map(astuple, view.parts), False)
        else:
            watched = _Watched(viewer, view)
            watch(columns, watched.read, seconds, watched.explain)


class _Watched:
    """What a view that is shown again and again has found last.

    Args:
        viewer: looks.
        view: that of its first look, which is shown first.
    """

    def __init__(self, viewer: Viewer, view: View) -> None:
        self._viewer = viewer
        self._view = view
        self._is_shown = False
        self._told = ""

    def read(self) -> Iterable[tuple[Any, ...]]:
        """Look, and return the rows; those of before if no broker answers."""
        self._told = ""
        try:
            if self._is_shown:
                self._view = self._viewer.look()
        except UnavailableError as error:
            self._told = f"this is what was known before: {printable(error)}"
        self._is_shown = True
        return map(astuple, self._view.parts)

    def explain(self) -> Iterator[str]:
        """Say on what the rows rest."""
        if self._told:
            yield self._told
        yield from _explain_view(self._view)


def _explain_view(view: View) -> Iterator[str]:
    """Say on what the table rests, and what it does not show."""
    if view.time is None:
        told = f"{view.log} has no record yet"
    elif view.is_now:
        told = f"by the brokers' clocks it is {printable(view.time)}"
    else:
        told = (
            f"this client may not write to {view.log}: its newest record is of "
            f"{printable(view.time)}, and who has died since seems to live"
        )
    yield told
    for one in view.pauses:
        yield (
            f"paused: {printable(one.group)} until {printable(one.until)} by "
            f"{printable(one.client)}, in {one.places} partitions of the log"
        )


def _verify(settings: Settings, topic: str, as_json: bool) -> None:
    from jobs_lib.coordination.verification import Result, Verified, verify

    found = verify(settings, topic)
    show([one.name for one in fields(Verified)], map(astuple, found), as_json)
    sys.exit(1 if any(one.result is Result.DIFFERS for one in found) else 0)


@coordination.command("pause")
@_group_argument
@click.option(
    "--for",
    "lasts",
    metavar="DURATION",
    callback=read_duration,
    help="How long: such as 90s, 10m, 2h or 1d.",
)
@click.option(
    "--until",
    metavar="TIME",
    callback=read_time,
    help="The end, in UTC: such as 2026-08-01T22:00.",
)
@_log_option
@_wait_option
@json_option
def coordination_pause(
    group: str,
    lasts: timedelta | None,
    until: datetime | None,
    log: str | None,
    wait: float,
    as_json: bool,
) -> None:
    """Let the members of GROUP release all, and claim nothing until the pause is over.

    It waits until nobody holds anything, and exits with 1 if somebody still does then.
    """
    end = lasts if lasts is not None else until
    if end is None or (lasts is not None and until is not None):
        raise OperatingError("say how long: --for 10m, or --until with a time")
    settings, topic = _find_log(log)
    from jobs_lib.operating.coordination import pause

    done = pause(settings, topic, group, end, wait=wait)
    if as_json:
        show_json(asdict(done))
    else:
        before = (
            f"; it was paused until {printable(done.before)}" if done.before else ""
        )
        click.echo(f"paused: {group} until {printable(done.until)}{before}")
        _warn_of_unknown(group, topic, is_known=done.is_known)
        _name_holders(done.holders)
    sys.exit(1 if done.holders else 0)


@coordination.command("resume")
@_group_argument
@_log_option
def coordination_resume(group: str, log: str | None) -> None:
    """End the pause of GROUP, whoever has made it."""
    settings, topic = _find_log(log)
    from jobs_lib.operating.coordination import resume

    before = resume(settings, topic, group)
    told = "it was not paused" if before is None else f"the end was {printable(before)}"
    click.echo(f"resumed: {group}; {told}")


@coordination.command("release")
@_group_argument
@_log_option
@_wait_option
@json_option
def coordination_release(
    group: str, log: str | None, wait: float, as_json: bool
) -> None:
    """Let the members of GROUP release all that they hold, and claim it anew.

    It exits with 1 if somebody has held on to a partition.
    """
    settings, topic = _find_log(log)
    from jobs_lib.operating.coordination import release

    done = release(settings, topic, group, wait=wait)
    if as_json:
        show_json(asdict(done))
    else:
        click.echo(f"{'not all ' if done.holders else ''}released: {group}")
        _warn_of_unknown(group, topic, is_known=done.is_known)
        _name_holders(done.holders)
    sys.exit(1 if done.holders else 0)


@coordination.command("set-position")
@_group_argument
@click.argument("topic")
@click.option(
    "--partition",
    "partitions",
    type=PARTITIONS,
    multiple=True,
    help="Only this one; repeat it. An offset needs it.",
)
@click.option(
    "--to",
    callback=_read_place,
    metavar="earliest|latest|OFFSET|TIME",
    required=True,
    help="The next record: the oldest one, one that comes, the one of an offset, or "
    "the first one of a time (UTC) or later.",
)
@_log_option
@click.option(
    "--wait",
    type=FiniteRange(0, 3_600),
    default=10.0,
    show_default=True,
    help="Seconds to wait until nobody holds one of the partitions.",
)
@json_option
def coordination_set_position(
    group: str,
    topic: str,
    partitions: tuple[int, ...],
    to: Place,
    log: str | None,
    wait: float,
    as_json: bool,
) -> None:
    """Set where the paused GROUP goes on in TOPIC. The pause stays as it is."""
    settings, log_topic = _find_log(log)
    from jobs_lib.operating.coordination import Moved, set_position

    moved = set_position(
        settings, log_topic, group, topic, to, partitions=partitions, wait=wait
    )
    show([one.name for one in fields(Moved)], map(astuple, moved), as_json)
    command = f"jobs-lib coordination resume {group} --log {log_topic}"
    click.echo(f"go on: {command}", err=True)


@coordination.command("check")
@_log_option
@click.option(
    "--interval",
    type=FiniteRange(),
    help="The longest interval of its members, in seconds. By default "
    "JOBS_LIB_COORDINATION_INTERVAL.",
)
@json_option
def coordination_check(log: str | None, interval: float | None, as_json: bool) -> None:
    """Exit with 1 if the log may lose what is written to it. Warnings leave it at 0."""
    settings, topic = _find_log(log)
    from jobs_lib.operating.coordination import Fault, find_log_faults

    if interval is None:
        interval = settings.coordination_interval
    faults = find_log_faults(settings, topic, interval)
    show([one.name for one in fields(Fault)], map(astuple, faults), as_json)
    sys.exit(1 if any(one.level == "error" for one in faults) else 0)


@coordination.command("create")
@_log_option
@click.option(
    "--partitions",
    type=click.IntRange(1, 10_000),
    default=8,
    show_default=True,
    help="How many it has; this never changes.",
)
@click.option(
    "--replication",
    type=click.IntRange(1, 32_767),
    help="How many brokers have each record. Defaults to Kafka's own.",
)
def coordination_create(
    log: str | None, partitions: int, replication: int | None
) -> None:
    """Create the coordination log. A topic with other settings is refused."""
    settings, topic = _find_log(log)
    from jobs_lib.operating.coordination import create_log

    made = create_log(settings, topic, partitions=partitions, replication=replication)
    told = "created" if made else "there already"
    click.echo(f"{told}: {topic}, with {partitions} partitions")


def _find_log(given: str | None) -> tuple[Settings, str]:
    settings = default_settings()
    require_bootstrap_servers(settings)
    log = given or settings.coordination_topic
    if not log:
        raise ConfigurationError(
            "which coordination log? Give its name in Kafka by --log, or set "
            "JOBS_LIB_COORDINATION_TOPIC"
        )
    return settings, log


def _warn_of_unknown(group: str, log: str, *, is_known: bool) -> None:
    if not is_known:
        click.echo(
            f"warning: the log has said nothing of a group {group}: see `jobs-lib "
            f"coordination show --log {log}` for those that it knows",
            err=True,
        )


def _name_holders(holders: Iterable[Holder]) -> None:
    for one in holders:
        click.echo(
            f"still held: {printable(one.topic)}/{one.partition} by "
            f"{printable(one.client)}, instance {printable(one.instance)}, "
            f"{one.state}. If it hangs, end that process",
            err=True,
        )
