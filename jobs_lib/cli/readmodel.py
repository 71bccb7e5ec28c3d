"""The commands `jobs-lib readmodel …`."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import astuple, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs_lib.addresses import check_url
from jobs_lib.app import load_app
from jobs_lib.cli.options import (
    OFFSETS,
    PARTITIONS,
    TIMES,
    FiniteRange,
    app_argument,
    log_options,
    processes_option,
)
from jobs_lib.cli.terminal import json_option, show
from jobs_lib.consuming.model_table import write_statements
from jobs_lib.errors import ConfigurationError, OperatingError
from jobs_lib.postgres.database import Database
from jobs_lib.settings import default_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.app import App
    from jobs_lib.consuming.resync import Part
    from jobs_lib.settings import Settings


_SOURCE = "SOURCE_DATABASE_URL"
_STOPPED = 143
"""The exit code of work that was stopped before its end, as a shell shows SIGTERM."""


def _source_table(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that name the source's table and its columns."""
    for option in (
        click.option("--version", default="version", show_default=True, metavar="COL"),
        click.option("--key", metavar="COL", help="The column of the key."),
        click.option("--table", "source", help="The source's table or view."),
    ):
        command = option(command)
    return command


_partition_option = click.option("--partition", type=PARTITIONS, help="Only this one.")
_offset_option = click.option(
    "--from-offset",
    type=OFFSETS,
    metavar="OFFSET",
    help="From this offset of the partition.",
)
_time_option = click.option(
    "--from-time", type=TIMES, help="From the first record since (UTC)."
)


@click.group()
def readmodel() -> None:
    """Make the tables of read models, and read their topics again."""


@readmodel.command("create")
@click.argument("table")
@click.option("--key", required=True, help="The column of the record's key.")
@click.option("--key-sql-type", default="text", show_default=True, help="Its type.")
@click.option(
    "--column",
    "columns",
    metavar="NAME=TYPE",
    multiple=True,
    help="Another column and its type in SQL, as in 'seats=int not null'; repeat it.",
)
@click.option("--writer", help="The role of the consumer. Defaults to the owner.")
@click.option(
    "--reader", "readers", multiple=True, help="A role that may read; repeat it."
)
@click.option(
    "--fillfactor",
    type=int,
    default=80,
    show_default=True,
    help="How full inserts leave each page, in percent.",
)
def readmodel_create(
    table: str,
    key: str,
    key_sql_type: str,
    columns: tuple[str, ...],
    writer: str | None,
    readers: tuple[str, ...],
    fillfactor: int,
) -> None:
    """Print the SQL that makes TABLE for a read model; connects to no database.

    Only the role of the consumer may write the table. `create_read_model` does the same
    in a migration.
    """
    statements = write_statements(
        table,
        key=key,
        columns=_read_columns(columns),
        key_sql_type=key_sql_type,
        writer=writer,
        readers=readers,
        fillfactor=fillfactor,
    )
    for statement in ("begin", *statements, "commit"):
        click.echo(f"{statement};")


@readmodel.command("status")
@app_argument
@json_option
def readmodel_status(app: str, as_json: bool) -> None:
    """Show how far each read model is, and where one stands still."""
    from jobs_lib.operating.read_models import ModelPart, list_read_models

    rows = map(astuple, list_read_models(load_app(app)))
    show([one.name for one in fields(ModelPart)], rows, as_json)


@readmodel.command("replay")
@app_argument
@click.argument("topic")
@click.option("--group", help="The consumer group, if several read the topic.")
@_partition_option
@click.option("--from-start", is_flag=True, help="From the oldest record there is.")
@_offset_option
@_time_option
@json_option
def readmodel_replay(
    app: str,
    topic: str,
    group: str | None,
    partition: int | None,
    from_start: bool,
    from_offset: int | None,
    from_time: datetime | None,
    as_json: bool,
) -> None:
    """Apply records of TOPIC again, in order, from the first one that was skipped.

    The service may run: it goes on from there within two heartbeats. Handlers must be
    declared with repeatable=True.
    """
    from jobs_lib.operating.rewinds import (
        Rewound,
        find_repeatable,
        find_start,
        replay,
        rewind,
    )

    at = _choose_place(from_offset, from_time, from_start=from_start)
    loaded = load_app(app)
    declared = find_repeatable(loaded, topic, group)
    database = Database.of(loaded.settings)
    names = declared.group, declared.topic
    if at is None and not from_start:
        rewound = replay(loaded.settings, database, *names, partition)
    else:
        places = find_start(
            loaded.settings, database, *names, "start" if at is None else at, partition
        )
        rewound = rewind(database, *names, places)
    show([one.name for one in fields(Rewound)], map(astuple, rewound), as_json)
    for one in rewound:
        if one.gone:
            click.echo(
                f"{one.topic}/{one.partition}: skipped records that are gone, by "
                f"retention or a cut log: {one.gone}. They are not applied, and their "
                "rows in the table skipped stay until you delete them",
                err=True,
            )
    if not any(one.after < one.before for one in rewound):
        click.echo("there is nothing to apply again", err=True)


@readmodel.command("resync")
@app_argument
@click.argument("table")
@_partition_option
@_offset_option
@_time_option
@processes_option
@click.option("--cancel", is_flag=True, help="End one that has begun; change nothing.")
@click.option("--group", hidden=True, help="Of the one that the parent has begun.")
def readmodel_resync(
    app: str,
    table: str,
    partition: int | None,
    from_offset: int | None,
    from_time: datetime | None,
    processes: int,
    cancel: bool,
    group: str | None,
) -> None:
    """Write the rows of TABLE again from its topic, beside the running service.

    If everything is read, rows whose keys the topic does not show go at the end.
    Started again after it was stopped, it goes on where it is. Several processes, of
    one command or of many, share the partitions.
    """
    from jobs_lib.service.resync import begin_resync, cancel_resync
    from jobs_lib.service.supervisor import Supervisor, end_while_loading

    end_while_loading(_STOPPED)
    loaded = load_app(app)
    if cancel:
        cancel_resync(loaded, table)
        return
    if group is None:
        at = _choose_place(from_offset, from_time)
        group = begin_resync(loaded, table, at, partition)
    if processes > 1:
        command = [sys.executable, "-m", "jobs_lib.cli", *log_options()]
        command += ["readmodel", "resync", app, table, "--group", group]
        sys.exit(Supervisor(command, processes, ends=True).run())
    _resync(loaded, table, group)


def _resync(app: App, table: str, group: str) -> None:
    """Take part in a re-synchronisation until its end, and say how it ended."""
    from jobs_lib.service.limits import tune_memory
    from jobs_lib.service.resync import resync
    from jobs_lib.service.supervisor import STOPPING, read_share, stop_with_parent
    from jobs_lib.signals import handle_signals

    stopping = threading.Event()
    handle_signals(STOPPING, lambda _: stopping.set())
    share = read_share()
    if share is not None:
        stop_with_parent(stopping.set)
    # One line for all processes of this command is enough.
    report = _show_progress if share is None or share[0] == 1 else _show_nothing
    # The garbage collector alone would take a third of this process's time.
    tune_memory()
    ended = resync(app, table, group=group, report=report, stopping=stopping)
    if ended is None:
        click.echo("stopped; the same command goes on with it", err=True)
        sys.exit(_STOPPED)
    removed = f"{ended.removed} keys removed"
    if ended.is_last:
        click.echo(f"{table} was read again to the end; {removed}")
    else:
        click.echo(f"another process has ended the work on {table}; {removed} here")


@readmodel.command("verify")
@app_argument
@click.argument("table")
@click.option(
    "--file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="What `readmodel keys` has written there, in the place of the database.",
)
@_source_table
@json_option
def readmodel_verify(
    app: str,
    table: str,
    file: Path | None,
    source: str | None,
    key: str | None,
    version: str,
    as_json: bool,
) -> None:
    """Compare the keys and versions of TABLE with those of its source.

    The source's database is the one that SOURCE_DATABASE_URL names. It looks twice,
    since changes are on their way. Exits with 1 if keys differ.
    """
    from jobs_lib.operating.verification import (
        Difference,
        FileSide,
        Side,
        TableSide,
        verify,
    )
    from jobs_lib.service.resync import find_model_of

    loaded = load_app(app)
    # Other users of the machine see the options of a command, and its password in them.
    url = os.environ.get(_SOURCE)
    if file is not None:
        other: Side = FileSide(file)
    elif url and source and key:
        other = TableSide.of(_open_source(url, loaded.settings), source, key, version)
    else:
        raise OperatingError(
            f"say where the source is: its database's URL in {_SOURCE}, with --table "
            "and --key; or --file"
        )
    database = Database.of(loaded.settings)
    model = TableSide.of_model(database, find_model_of(loaded, table))
    found = verify(other, model)
    show([one.name for one in fields(Difference)], map(astuple, found), as_json)
    sys.exit(1 if found else 0)


def _open_source(url: str, settings: Settings) -> Database:
    """The source's database; settings of PgBouncer are for the model's alone."""
    try:
        checked = check_url(url)
    except ConfigurationError as error:
        raise ConfigurationError(f"{_SOURCE} cannot be used: {error}") from None
    beside = {"database_url": checked, "direct_url": "", "pgbouncer": False}
    return Database.of(settings.model_copy(update=beside), variable=_SOURCE)


@readmodel.command("keys")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@_source_table
def readmodel_keys(
    file: Path, source: str | None, key: str | None, version: str
) -> None:
    """Write the keys and versions of a table to FILE, for `readmodel verify`.

    The table is in the database of JOBS_LIB_DATABASE_URL.
    """
    from jobs_lib.operating.verification import TableSide, write_keys

    if not (source and key):
        raise OperatingError("give the table with --table, and its key with --key")
    database = Database.of(default_settings())
    side = TableSide.of(database, source, key, version)
    click.echo(f"{write_keys(side, file)} keys are in {file}")


@readmodel.command("switch")
@app_argument
@click.argument("table")
@click.argument("version", type=click.IntRange(1))
@click.option(
    "--wait",
    type=FiniteRange(0),
    default=60.0,
    show_default=True,
    help="Seconds to wait until the version has caught up.",
)
@click.option(
    "--with-skipped",
    is_flag=True,
    help="Switch though it has skipped records that the version before has not.",
)
def readmodel_switch(
    app: str, table: str, version: int, wait: float, with_skipped: bool
) -> None:
    """Let readers of TABLE see another VERSION of it, from one moment to the next.

    The version before is kept up to date under another name, until it is dropped.
    """
    from jobs_lib.operating.switching import switch

    done = switch(
        load_app(app), table, version, patience=wait, with_skipped=with_skipped
    )
    click.echo(
        f"readers of {table} see version {done.after} in the place of {done.before}; "
        f"they may have waited for {done.seconds * 1000:.0f} ms"
    )
    if done.untold:
        click.echo(
            f"version {done.before} still calls on_change for {done.untold} offsets "
            "that it has not come to: keep it until then"
        )


@readmodel.command("drop")
@app_argument
@click.argument("table")
@click.argument("version", type=click.IntRange(1))
@click.option(
    "--lose-effects",
    is_flag=True,
    help="Drop it though on_change was not called for all its records.",
)
def readmodel_drop(app: str, table: str, version: int, lose_effects: bool) -> None:
    """Drop the tables of a VERSION of TABLE that readers do not see.

    The app must not declare it any more, and no pod keep it. It must have called
    on_change for all that came before the switch.
    """
    from jobs_lib.operating.dropping import drop_version

    places = drop_version(load_app(app), table, version, loses_effects=lose_effects)
    click.echo(f"dropped {', '.join(places)}")


def _choose_place(
    from_offset: int | None, from_time: datetime | None, *, from_start: bool = False
) -> int | datetime | None:
    """The offset or the time that is given; None for the start, or if none is."""
    given = [from_start, from_offset is not None, from_time is not None]
    if sum(given) > 1:
        raise OperatingError(
            "--from-start, --from-offset and --from-time are given together: give one"
        )
    return from_offset if from_time is None else from_time.replace(tzinfo=UTC)


def _show_progress(parts: list[Part]) -> None:
    left = [part.end - part.at for part in parts if not part.is_done]
    click.echo(f"{sum(left)} records are left in {len(left)} partitions", err=True)


def _show_nothing(parts: list[Part]) -> None: ...


def _read_columns(given: tuple[str, ...]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for column in given:
        name, equals, definition = column.partition("=")
        if not equals:
            raise OperatingError(
                f"--column {column!r} has no type: write it as in 'seats=int not null'"
            )
        if name in columns:
            raise OperatingError(f"--column {name!r} is given twice: give it once")
        columns[name] = definition
    return columns
