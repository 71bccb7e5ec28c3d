"""The environment that a database serves: recorded in it, and changed for a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import text

from jobs_lib.errors import ConfigurationError
from jobs_lib.naming import check_environment, make_template
from jobs_lib.postgres.values import quote

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from jobs_lib.settings import Settings

COPIED = (
    "jobs",
    "claims",
    "cancellations",
    "slots",
    "discarded",
    "schedules",
    "outbox",
    "holds",
    "held_rows",
    "touched",
    "offsets",
    "skipped",
    "sources",
    "filled_topics",
    "kept_places",
    "answers",
    "resyncs",
    "resync_parts",
    "resync_noted",
    "resync_shown",
    "resync_unshown",
    "reexports",
    "reexports_not_cancelled",
    "reexport_ranges",
    "reexport_additions",
    "rebuilds",
    "topic_copies",
    "reexport_states",
    "reexport_versions",
    "streams",
    "requests",
    "origins",
    "processes",
    "topics",
)
"""Tables whose rows belong to the original when a database is a copy."""


def adopt(
    connection: Connection, schema: str, settings: Settings, copied_from: str
) -> None:
    """Give a copy of another environment's database to this one, and delete its work.

    Raises:
        ConfigurationError: the database is no copy of that environment's.
    """
    found, _ = _read_installation(connection, schema)
    if found != copied_from:
        raise ConfigurationError(
            f"the database belongs to the environment {found or 'none'!r}, not to "
            f"{copied_from!r}: its jobs and records were left alone"
        )
    tables = ", ".join(f"{quote(schema)}.{table}" for table in COPIED)
    connection.execute(text(f"truncate {tables}"))
    connection.execute(
        text(
            f"insert into {quote(schema)}.topics (topic, partitions, home)"
            " values ('local', 16, true)"
        )
    )
    connection.execute(
        text(
            f"update {quote(schema)}.installation"
            " set id = gen_random_uuid(), environment = ''"
        )
    )


def record_environment(
    connection: Connection, schema: str, settings: Settings | None
) -> None:
    """Record the database's environment; the topics' naming may change.

    Raises:
        ConfigurationError: the database serves another environment.
    """
    if settings is None:
        return
    found = _read_installation(connection, schema)
    if found[0]:
        check_environment(settings, found[0])
    wanted = settings.environment, make_template(settings)
    # A role that does not own the tables may not even ask for the row's lock. It may
    # find that there is nothing to do.
    if found == wanted:
        return
    connection.execute(
        text(
            f"update {quote(schema)}.installation set environment = :environment,"
            " topic_template = :template"
        ),
        {"environment": wanted[0], "template": wanted[1]},
    )


def _read_installation(connection: Connection, schema: str) -> tuple[str, str]:
    """Read the environment and its topics' template; the lock of migrations is held."""
    found = connection.execute(
        text(f"select environment, topic_template from {quote(schema)}.installation")
    )
    environment, template = found.one()
    return environment, template
