"""Which environment a database serves: noted in it, and changed for a copy."""

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
    "reexports",
    "reexport_ranges",
    "origins",
    "processes",
    "topics",
)
"""What belongs to the original where a database is a copy."""


def adopt(
    connection: Connection, schema: str, settings: Settings, copied_from: str
) -> None:
    """Make a copy of another environment's database this one's, and forget its work.

    Raises:
        ConfigurationError: it is no copy of that environment's.
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
    """Note whose database it is; how topics are named there may change.

    Raises:
        ConfigurationError: it is another environment's.
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
