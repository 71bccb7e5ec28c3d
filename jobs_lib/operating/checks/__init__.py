"""Look for what is set up wrong: every check names what it found, and a way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from jobs_lib.errors import JobsError, SchemaVersionError
from jobs_lib.operating.checks import kafka, outbox, server, tables, work
from jobs_lib.operating.checks.finding import Finding, Limits, Look
from jobs_lib.operating.session import bounded
from jobs_lib.postgres.migrate import latest_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings

__all__ = ["CHECKS", "Finding", "Limits", "check"]

CHECKS: dict[str, Callable[[Look], Iterator[Finding]]] = {
    "privileges": server.check_privileges,
    "functions": server.check_functions,
    "autovacuum": server.check_autovacuum,
    "oldest transaction": server.check_transactions,
    "multixacts": server.check_multixacts,
    "pooler": server.check_pooler,
    "bloat": tables.check_bloat,
    "statistics": tables.check_statistics,
    "blocked groups": work.check_groups,
    "outbox": outbox.check_outbox,
    "owners": work.check_owners,
    "types": work.check_types,
    "partitioner": work.check_placement,
    "topics": kafka.check_topics,
}

# One looks at what happens between transactions, the other waits for Kafka.
_UNBOUNDED = {"pooler", "topics"}


def check(
    database: Database,
    settings: Settings,
    *,
    role: str | None = None,
    limits: Limits | None = None,
) -> list[Finding]:
    """Run every check; what is in order gets one finding of level ``ok``.

    Args:
        database: what to look at.
        settings: of the service: where Kafka is, and when a process counts as dead.
        role: whose privileges are checked. Defaults to the role that connects.
        limits: from when on something is wrong. Defaults to ``Limits()``.

    Raises:
        UnavailableError: the database does not answer.
    """
    try:
        version = database.check_version(latest_version())
    except SchemaVersionError as error:
        return [Finding("error", "schema", str(error), "jobs-lib migrate")]
    found = [Finding("ok", "schema", f"the tables have version {version}")]
    with database.connect("check") as connection:
        look = Look(connection, database, settings, limits or Limits(), role)
        for name, one in CHECKS.items():
            found += _run(look, name, one) or [Finding("ok", name, "in order")]
    return found


def _run(
    look: Look, name: str, one: Callable[[Look], Iterator[Finding]]
) -> list[Finding]:
    try:
        if name in _UNBOUNDED:
            return list(one(look))
        with bounded(look.connection, look.database):
            return list(one(look))
    except (JobsError, psycopg.Error) as error:
        reason = str(error).strip().splitlines()[0]
        return [
            Finding("error", name, f"could not be looked at: {reason}", "see there")
        ]
