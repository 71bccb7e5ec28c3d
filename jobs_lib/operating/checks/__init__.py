"""Look for faults in the setup: every check names what it found, and a way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from jobs_lib.errors import JobsError, SchemaVersionError
from jobs_lib.operating.checks import (
    consumers,
    coordination,
    kafka,
    outbox,
    read_models,
    server,
    tables,
    work,
)
from jobs_lib.operating.checks.finding import Finding, Limits, Target
from jobs_lib.operating.session import bounded, find_patience
from jobs_lib.postgres.revisions import check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings

__all__ = ["CHECKS", "Finding", "Limits", "check"]

CHECKS: dict[str, Callable[[Target], Iterator[Finding]]] = {
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
    "read models": read_models.check_tables,
    "stopped partitions": consumers.check_stopped,
    "skipped records": consumers.check_skipped,
    "shared groups": consumers.check_shared,
    "topics": kafka.check_topics,
    "coordination log": coordination.check_log,
}

# Not in one bounded transaction: the first needs several, the others wait for Kafka.
_UNBOUNDED = {"pooler", "shared groups", "topics", "coordination log"}


def check(
    database: Database,
    settings: Settings,
    *,
    role: str | None = None,
    limits: Limits | None = None,
) -> list[Finding]:
    """Run every check; a check without findings gives one of level ``ok``.

    Args:
        database: the database to check.
        settings: the service's: where Kafka is, and when a process counts as dead.
        role: the role whose privileges are checked. Defaults to the connecting role.
        limits: the values from which something is wrong. Defaults to ``Limits()``.

    Raises:
        UnavailableError: the database does not answer.
    """
    try:
        version = check_version(database)
    except SchemaVersionError as error:
        return [Finding("error", "schema", str(error), "jobs-lib migrate")]
    found = [Finding("ok", "schema", f"the tables have version {version}")]
    patience = find_patience(database)
    with database.connect("check", answer_within=patience) as connection:
        target = Target(connection, database, settings, limits or Limits(), role)
        for name, one in CHECKS.items():
            found += _run(target, name, one) or [Finding("ok", name, "in order")]
    return found


def _run(
    target: Target, name: str, one: Callable[[Target], Iterator[Finding]]
) -> list[Finding]:
    try:
        if name in _UNBOUNDED:
            return list(one(target))
        with bounded(target.connection, target.database):
            return list(one(target))
    except (JobsError, psycopg.Error) as error:
        reason = str(error).strip().splitlines()[0]
        return [Finding("error", name, f"could not be checked: {reason}", "see there")]
