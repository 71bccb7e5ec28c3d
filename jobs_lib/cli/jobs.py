"""The commands `jobs-lib jobs …` and `jobs-lib check`."""

from __future__ import annotations

import sys
from dataclasses import asdict, astuple, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from jobs_lib import operating
from jobs_lib.cli.options import IDS, TIMES, FiniteRange
from jobs_lib.cli.terminal import json_option, printable, show, show_json, watch
from jobs_lib.errors import OperatingError
from jobs_lib.masking import plain_lines
from jobs_lib.operating import Filter, Listed
from jobs_lib.operating.listing import LIMIT, STATES
from jobs_lib.operating.owners import Owned
from jobs_lib.operating.pauses import KINDS
from jobs_lib.postgres.database import Database
from jobs_lib.settings import default_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.operating import Explanation

_job = click.argument("job", metavar="ID", type=IDS)
_kind = click.argument("kind", type=click.Choice(KINDS))
_name = click.argument("name")


def _filtered(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a filter."""
    for option in reversed(
        [
            click.option("--type", "type_", metavar="TYPE", help="Only of this type."),
            click.option("--group", help="Only of this group."),
            click.option("--origin", help="Only of this origin, such as orders/7."),
            click.option(
                "--error", metavar="TEXT", help="The last error contains TEXT."
            ),
            click.option(
                "--since",
                type=TIMES,
                help="Failed or finished at this time (UTC) or later.",
            ),
        ]
    ):
        command = option(command)
    return command


@click.group()
def jobs() -> None:
    """Show jobs, and cancel, pause, retry or enqueue them."""


@jobs.command("list")
@click.option(
    "--state", type=click.Choice(STATES), help="Defaults to all unfinished jobs."
)
@_filtered
@click.option(
    "--after",
    type=click.IntRange(0, IDS.max),
    default=0,
    metavar="ID",
    help="Go on behind this job, the last one of a page.",
)
@click.option("--limit", type=click.IntRange(1, LIMIT), default=50, show_default=True)
@json_option
def list_(
    state: str | None, after: int, limit: int, as_json: bool, **filter: Any
) -> None:
    """List jobs by id; scheduled ones by due time, finished ones newest first."""
    found = operating.list_jobs(
        _database(), state, _filter(**filter), after=after, limit=limit
    )
    show([one.name for one in fields(Listed)], map(astuple, found), as_json)
    if len(found) == limit and not as_json:
        click.echo(
            f"# {limit} jobs are shown, there may be more: go on with --after "
            f"{found[-1].id}"
        )


@jobs.command("show")
@_job
@json_option
def show_(job: int, as_json: bool) -> None:
    """Show a job with its payload, headers and errors."""
    found = operating.show_job(_database(), job)
    if found is None:
        raise OperatingError(
            f"no table has job {job}: `jobs-lib jobs explain {job}` says why"
        )
    if as_json:
        show_json(asdict(found))
        return
    for name, value in asdict(found).items():
        if name != "errors" and value is not None:
            click.echo(f"{name + ':':13}{printable(value)}")
    for error in found.errors or []:
        click.echo(
            printable(
                f"attempt {error['attempt']} failed at {error['at']}: {error['error']}"
            )
        )
        if trace := error.get("trace"):
            click.echo(plain_lines(trace))


@jobs.command()
@_job
@json_option
def explain(job: int, as_json: bool) -> None:
    """Say why a job does not run."""
    settings = default_settings()
    found = operating.explain(
        _database(), job, stale_after=settings.stale_after, settings=settings
    )
    if as_json:
        show_json(asdict(found))
        return
    explanation: Explanation | None = found
    while explanation is not None:
        for reason in explanation.reasons:
            click.echo(f"job {explanation.job}: {printable(reason.text)}")
        for place in explanation.places:
            click.echo(f"job {explanation.job}: {printable(place)}")
        explanation = explanation.head


@jobs.command()
@click.argument("ids", metavar="ID...", type=IDS, nargs=-1, required=True)
@json_option
def cancel(ids: tuple[int, ...], as_json: bool) -> None:
    """Remove waiting jobs, and ask running ones to stop.

    The exit code is 1 if one of them was not among the unfinished jobs.
    """
    settings = default_settings()
    became = operating.cancel(
        _database(), ids, keep=settings.history_days, stale_after=settings.stale_after
    )
    show(("id", "became"), became.items(), as_json)
    if "missing" in became.values():
        sys.exit(1)


@jobs.command()
@_kind
@_name
def pause(kind: str, name: str) -> None:
    """Start no more jobs of a type, an origin or a group, on any pod."""
    change = operating.pause(_database(), kind, name)
    if not change.known:
        click.echo(
            f"warning: no {kind} {name!r} is known now; it is paused if it comes",
            err=True,
        )
    click.echo(f"{'paused' if change.changed else 'was paused already'}: {kind} {name}")


@jobs.command()
@_kind
@_name
def resume(kind: str, name: str) -> None:
    """Let the jobs of a type, an origin or a group start again."""
    change = operating.resume(_database(), kind, name)
    click.echo(f"{'resumed' if change.changed else 'was not paused'}: {kind} {name}")


@jobs.command()
@json_option
def pauses(as_json: bool) -> None:
    """List all pauses."""
    found = operating.list_pauses(_database())
    show(("kind", "name", "paused_at"), map(astuple, found), as_json)


_ids = click.argument("ids", metavar="[ID]...", type=IDS, nargs=-1)


def _all(what: str) -> Callable[..., Any]:
    return click.option("--all", "everything", is_flag=True, help=f"All {what} jobs.")


@jobs.command()
@_ids
@_filtered
@_all("failed")
@json_option
def retry(ids: tuple[int, ...], everything: bool, as_json: bool, **filter: Any) -> None:
    """Run jobs now: discarded ones, and those that wait for another attempt.

    A filter selects only failed jobs; a job that is delayed or snoozed runs now if its
    ID is given. The exit code is 1 if one of the IDs could not be retried, or if a job
    stays discarded because another unfinished job has its unique key.
    """
    chosen = _choose(ids, everything, filter)
    stale_after = default_settings().stale_after
    done = operating.retry(_database(), *chosen, stale_after=stale_after)
    if as_json:
        show_json(asdict(done))
    else:
        click.echo(f"retried: {done.retried}")
        for job in done.conflicts:
            click.echo(f"still discarded: {job}, another job has its unique key")
        for job, reason in done.left.items():
            click.echo(f"not retried: {job}, {printable(reason.text)}")
        if done.unfinished:
            counts = (f"{count} {state}" for state, count in done.unfinished.items())
            click.echo(f"no such job has failed; unfinished: {', '.join(counts)}")
    if done.conflicts or done.left:
        sys.exit(1)


@jobs.command()
@_ids
@_filtered
@_all("discarded")
@json_option
def delete(
    ids: tuple[int, ...], everything: bool, as_json: bool, **filter: Any
) -> None:
    """Delete discarded jobs for good, by id or by filter."""
    deleted = operating.delete_discarded(_database(), *_choose(ids, everything, filter))
    if as_json:
        show_json({"deleted": deleted})
    else:
        click.echo(f"deleted: {deleted}")


@jobs.command()
@json_option
def maintain(as_json: bool) -> None:
    """Make the history's next days and drop those whose time is over.

    A running service does this every hour.
    """
    done = operating.maintain(_database(), {default_settings().history_days})
    if as_json:
        show_json(asdict(done))
    elif done.skipped:
        click.echo("another process does it now")
    else:
        click.echo(
            f"days made: {done.made}, dropped: {done.dropped}, left for later: "
            f"{done.left}; rows deleted: {done.deleted}"
        )


@click.command()
@click.option("--role", help="Check this role's privileges, not your own.")
@json_option
def check(role: str | None, as_json: bool) -> None:
    """Look for faults in the setup of the database, and of Kafka if it is set.

    The exit code is 1 if there is an error; warnings leave it at 0.
    """
    found = operating.check(_database(), default_settings(), role=role)
    show(("level", "check", "what", "way_out"), map(astuple, found), as_json)
    if any(one.level == "error" for one in found):
        sys.exit(1)


@click.command()
@click.option(
    "--watch",
    "seconds",
    type=FiniteRange(0.1),
    help="Show them again after this many seconds, until Ctrl-C.",
)
@json_option
def owners(seconds: float | None, as_json: bool) -> None:
    """Show the owner of each origin, and the work in it."""
    settings, database = default_settings(), _database()
    columns = [one.name for one in fields(Owned)]

    def read() -> list[tuple[Any, ...]]:
        return [astuple(one) for one in operating.list_owners(database, settings)]

    if seconds is None:
        show(columns, read(), as_json)
    elif as_json:
        raise OperatingError("--json prints once: leave --watch out")
    else:
        watch(columns, read, seconds)


def _choose(
    ids: tuple[int, ...], everything: bool, filter: dict[str, Any]
) -> tuple[tuple[int, ...] | None, Filter]:
    chosen = _filter(**filter)
    if not (ids or chosen or everything):
        raise OperatingError(
            "say which: ids, a filter such as --type or --error, or --all"
        )
    return ids or None, chosen


def _filter(type_: str | None, since: datetime | None, **filter: Any) -> Filter:
    at = None if since is None else since.replace(tzinfo=UTC)
    return Filter(type=type_, since=at, **filter)


def _database() -> Database:
    return Database.of(default_settings())
