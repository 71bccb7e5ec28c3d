"""Bounded transactions: an operator's queries must not hold up the work."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import psycopg

from jobs_lib.errors import OperatingError
from jobs_lib.postgres.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from jobs_lib.postgres.database import Database

STATEMENT_SECONDS = 10.0
LOCK_SECONDS = 5.0
IDLE_SECONDS = 10.0
_UNCHANGED = "nothing was changed"


class LockedError(OperatingError):
    """Another transaction holds a lock for longer than a command may wait."""


class IdleError(OperatingError):
    """The process stood still in the middle of a transaction, which has ended."""


@contextmanager
def bounded(
    connection: psycopg.Connection[Any],
    database: Database,
    lock_seconds: float | None = None,
    idle_seconds: float = IDLE_SECONDS,
    *,
    so_far: str = _UNCHANGED,
) -> Iterator[None]:
    """Open a transaction with limits on how long statements run and wait for locks.

    Args:
        connection: without a transaction.
        database: with the statements.
        lock_seconds: how long a statement waits for a lock; five by default.
        idle_seconds: how long the process may do nothing between two statements: its
            locks last until then if it was stopped or its machine is gone.

    Raises:
        LockedError: a statement waited longer; nothing was changed.
        IdleError: the process did nothing for longer; nothing was changed.
        OperatingError: a statement took longer, or the connecting role lacks a right
            for it; nothing was changed.
    """
    patience = LOCK_SECONDS if lock_seconds is None else lock_seconds
    if isinstance(connection, Session) and connection.answer_within is None:
        # A silent server does not end statements either.
        connection.answer_within = find_patience(database)
    try:
        with connection.transaction():
            connection.execute(
                database.queries["bound_statements"],
                {
                    "statement_ms": str(round(STATEMENT_SECONDS * 1000)),
                    "lock_ms": str(round(patience * 1000)),
                },
            )
            connection.execute(
                database.queries["bound_idleness"],
                {"idle_ms": str(round(idle_seconds * 1000))},
            )
            yield
    except psycopg.errors.IdleInTransactionSessionTimeout:
        raise IdleError(
            f"this process stood still for {idle_seconds:g} s, and the server has "
            f"ended its transaction; {so_far}. Call it again"
        ) from None
    except psycopg.errors.InsufficientPrivilege as error:
        raise OperatingError(
            f"{connection.info.user} may not do this ({error.diag.message_primary}); "
            f"{so_far}. Connect as another role, or see `jobs-lib grants -h`"
        ) from None
    except psycopg.errors.LockNotAvailable:
        raise LockedError(
            f"waited {patience:g} s in vain for another transaction that has these "
            f"rows locked; {so_far}. Try again, or find the old transaction with "
            "`jobs-lib check`"
        ) from None
    except psycopg.errors.QueryCanceled:
        raise OperatingError(
            f"took longer than {STATEMENT_SECONDS:g} s and was stopped; {so_far}. "
            "Narrow it, by origin, group or time, or lower the limit"
        ) from None


def describe_batches(jobs: int) -> str:
    """Say how many jobs earlier batches have changed, for ``so_far``."""
    return f"the batches before changed {jobs}" if jobs else _UNCHANGED


def find_patience(database: Database) -> float:
    """Seconds after which a server that may be at work counts as silent."""
    return STATEMENT_SECONDS + database.timeout


def read_time(
    connection: psycopg.Connection[Any],
    database: Database,
    *,
    so_far: str = _UNCHANGED,
) -> datetime:
    """Read the database's clock, within the same limits.

    Args:
        connection: without a transaction.
        database: with the statements.
        so_far: what an error says of the work before.
    """
    with bounded(connection, database, so_far=so_far):
        row = connection.execute(database.queries["database_time"]).fetchone()
    return cast("tuple[datetime]", row)[0]
