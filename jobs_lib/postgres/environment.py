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

_COPIED = (
    "jobs",
    "claims",
    "discarded",
    "schedules",
    "outbox",
    "holds",
    "held_rows",
    "offsets",
    "skipped",
    "sources",
    "kept_places",
    "reexports",
    "reexports_not_cancelled",
    "reexport_ranges",
    "reexport_additions",
    "rebuilds",
    "topic_copies",
    "reexport_states",
    "reexport_versions",
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
    found = _read_environment(connection, schema)
    if found != copied_from:
        raise ConfigurationError(
            f"the database belongs to the environment {found or 'none'!r}, not to "
            f"{copied_from!r}: its jobs and records were left alone"
        )
    tables = ", ".join(f"{quote(schema)}.{table}" for table in _COPIED)
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
    found = _read_environment(connection, schema)
    if found:
        check_environment(settings, found)
    connection.execute(
        text(
            f"update {quote(schema)}.installation set environment = :environment,"
            " topic_template = :template where (environment, topic_template)"
            " is distinct from (:environment, :template)"
        ),
        {
            "environment": settings.environment,
            "template": make_template(settings),
        },
    )


def _read_environment(connection: Connection, schema: str) -> str:
    found = connection.execute(
        text(f"select environment from {quote(schema)}.installation for update")
    )
    return str(found.scalar_one())
