"""The command ``jobs-lib``: parse, call one function, print."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import click

from jobs_lib import __version__
from jobs_lib.cli.options import app_argument, log_options, processes_option
from jobs_lib.errors import JobsError
from jobs_lib.extras import explain_missing
from jobs_lib.masking import plain_lines, trace
from jobs_lib.reasons import count_bytes, explain_foreign
from jobs_lib.telemetry import logger
from jobs_lib.telemetry.logs import FORMATS, LEVELS, set_up_logging

_RUNNING = {"run", "executor", "relay"}
"""The commands that run an application's code."""


class LazyGroup(click.Group):
    """Loads a command group's module only on demand: Spark is heavy to import."""

    _modules = {
        "check": "jobs_lib.cli.jobs",
        "coordination": "jobs_lib.cli.coordination",
        "gates": "jobs_lib.cli.gates",
        "grants": "jobs_lib.cli.grants",
        "jobs": "jobs_lib.cli.enqueue",
        "owners": "jobs_lib.cli.jobs",
        "outbox": "jobs_lib.cli.outbox",
        "readmodel": "jobs_lib.cli.readmodel",
        "dev": "jobs_lib.cli.dev",
        # It adds commands to the group that it imports.
        "reexport": "jobs_lib.cli.repairs",
        "schemas": "jobs_lib.cli.schemas",
        "topics": "jobs_lib.cli.topics",
        "where": "jobs_lib.cli.where",
    }
    texts = {
        "check": "Look for faults in the setup of the database and of Kafka.",
        "coordination": "Show and steer groups that share partitions over a topic.",
        "gates": "Show for which groups consumers wait, and how far those are.",
        "grants": "Print the SQL that grants a role its rights, or run it.",
        "jobs": "Show jobs, and cancel, pause, retry or enqueue them.",
        "owners": "Show the owner of each origin, and the work in it.",
        "outbox": "Show rows that are not in Kafka yet, and rows that are held.",
        "readmodel": "Make the tables of read models, and read their topics again.",
        "dev": "A real PostgreSQL and Kafka for this project, without Docker.",
        "reexport": "Send the current states of an entity again, at a rate.",
        "schemas": "The Avro schemas of a service's topics.",
        "topics": "The topics of a service.",
        "where": "Find where the newest change of a key is, and what it waits for.",
    }
    """The texts of commands that are not loaded for the list of all commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List all names, with those of commands that are not loaded."""
        return sorted({*super().list_commands(ctx), *self._modules})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return the command, imported if need be."""
        if name in self._modules:
            imported = __import__(self._modules[name], fromlist=[name])
            command: click.Command = getattr(imported, name.replace("-", "_"))
            return command
        return super().get_command(ctx, name)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """List the commands without loading them."""
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        here = self.commands
        rows = [
            (name, self.texts.get(name) or here[name].get_short_help_str(limit))
            for name in names
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="jobs-lib")
@click.option(
    "-v", "--verbose", is_flag=True, help="Also log the start and the end of each job."
)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    default="info",
    show_default=True,
    envvar="JOBS_LIB_LOG_LEVEL",
    help="Log this level and above, also from the application.",
)
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    envvar="JOBS_LIB_LOG_FORMAT",
    help="Log each record as a line of text, or as an object of JSON.",
)
@click.pass_context
def cli(context: click.Context, verbose: bool, log_level: str, log_format: str) -> None:
    """Jobs and a transactional outbox on PostgreSQL, for services that talk over Kafka.

    Settings come from JOBS_LIB_* variables or jobs_lib.toml.
    """
    runs_app = context.invoked_subcommand in _RUNNING
    set_up_logging(log_level, log_format, verbose=verbose, app=runs_app)


@cli.command()
@click.option(
    "--copied-from",
    metavar="ENVIRONMENT",
    default="",
    help="The database is a copy of that environment's: make it this one's, and delete "
    "the jobs and records that wait in it.",
)
@click.option(
    "--shards",
    type=click.IntRange(1, 1_024),
    help="Parts of the outbox, each sent by one relay at a time; fixed when the tables "
    "are installed. Defaults to 16.",
)
@click.option(
    "--sql", "as_sql", is_flag=True, help="Only print the SQL, without a database."
)
@click.option(
    "--since",
    metavar="VERSION",
    help="With --sql: the version of the tables. By default there are no tables.",
)
def migrate(
    copied_from: str, shards: int | None, as_sql: bool, since: str | None
) -> None:
    """Install or upgrade the tables."""
    from jobs_lib.postgres.migrate import choose_url, write_sql
    from jobs_lib.postgres.migrate import migrate as upgrade
    from jobs_lib.settings import default_settings

    settings = default_settings()
    if as_sql:
        if copied_from:
            raise click.UsageError("--copied-from needs the database: leave --sql out")
        text = write_sql(settings.schema_name, settings, since=since, shards=shards)
        click.echo(text, nl=False)
        return
    if since is not None:
        raise click.UsageError("--since needs --sql: a database knows its version")
    version = upgrade(
        choose_url(settings),
        settings.schema_name,
        settings,
        copied_from=copied_from,
        shards=shards,
    )
    click.echo(f"schema {settings.schema_name!r} has version {version}")


@cli.command()
@app_argument
@click.option(
    "--without",
    type=click.Choice(["consumers", "executor", "relay"]),
    multiple=True,
    help="Leave a part to another process.",
)
def run(app: str, without: tuple[str, ...]) -> None:
    """Run a service: its consumers, executor and relay."""
    from jobs_lib.service.supervisor import end_while_loading

    end_while_loading()
    from jobs_lib.app import load_app
    from jobs_lib.service.preparation import PARTS, check_parts
    from jobs_lib.service.service import Service

    parts = [part for part in PARTS if part not in without]
    loaded = load_app(app)
    check_parts(loaded, parts)
    sys.exit(Service(loaded, parts).run())


@cli.command()
@app_argument
@processes_option
def executor(app: str, processes: int) -> None:
    """Run the executor as a sidecar of the service with the same pod name.

    It runs the jobs of the partitions assigned to the service, without joining the
    service's consumer group. Give both the same JOBS_LIB_POD.
    """
    _run_part("executor", app, processes, sidecar=True)


@cli.command()
@app_argument
@processes_option
def relay(app: str, processes: int) -> None:
    """Run only the relay of a service."""
    _run_part("relay", app, processes)


def _run_part(
    part: str, app: str, processes: int, *, sidecar: bool = False
) -> NoReturn:
    """Run one part of a service, in this process or in several."""
    from jobs_lib.service.supervisor import Supervisor, end_while_loading

    end_while_loading()
    from jobs_lib.app import load_app
    from jobs_lib.service.preparation import check_parts
    from jobs_lib.service.service import Service

    # Load it even for several processes, so that its errors are printed only once.
    loaded = load_app(app)
    check_parts(loaded, [part])
    if processes > 1:
        command = [sys.executable, "-m", "jobs_lib.cli", *log_options(), part, app]
        sys.exit(Supervisor(command, processes).run())
    sys.exit(Service(loaded, [part], sidecar=sidecar).run())


def main() -> None:
    """Run the command; an error that is no fault here is one line and exit code 2."""
    try:
        cli(standalone_mode=True)
    except JobsError as error:
        _fail(str(error))
    except Exception as error:
        if (told := _explain(error)) is not None:
            logger.debug("where it failed:", exc_info=error)
            _fail(told)
        # As Python itself would, but without values that a driver's error may repeat.
        click.echo(plain_lines(trace(error)), err=True)
        sys.exit(1)


def _fail(told: str) -> NoReturn:
    click.echo(f"error: {plain_lines(told).lstrip()}", err=True)
    sys.exit(2)


def _explain(error: Exception) -> str | None:
    """What an operator can do about an error of others; None if it is a fault here."""
    if isinstance(error, UnicodeEncodeError):
        odd = [word for word in sys.argv[1:] if count_bytes(word) < 0]
        return f"the argument {odd[0]!a} is not UTF-8: write it so" if odd else None
    if isinstance(error, ImportError):
        return explain_missing(error)
    # Commands that need no database do not load its driver.
    driver: Any = sys.modules.get("psycopg")
    # Migrations get the driver's error wrapped in one of SQLAlchemy.
    error = getattr(error, "orig", None) or error
    if driver is None or not isinstance(error, driver.Error):
        return None
    told = explain_foreign(error)
    if told is None:
        return None
    if isinstance(error, driver.errors.InsufficientPrivilege):
        return (
            f"the database does not let this role do that: {told}. Connect as another "
            "role, or see `jobs-lib grants -h`"
        )
    if isinstance(error, driver.OperationalError):
        return (
            f"the database has failed during the command: {told}. What it had "
            "committed stays: look at that, and try again"
        )
    return (
        f"the database refuses a statement: {told}. `jobs-lib check` looks whether the "
        "tables fit, and --log-level debug shows the place"
    )
