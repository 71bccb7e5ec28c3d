"""The history has a partition for each day: made ahead, dropped when its time is over.

Each step is a transaction of its own. Any number of processes may call
:func:`maintain`; one does the work, and the others leave it to that one.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from psycopg.errors import LockNotAvailable, UndefinedTable

from jobs_lib.errors import OperatingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import date

    import psycopg

    from jobs_lib.postgres.database import Database

# Dropping a partition locks the whole history, and completing a job then waits behind
# that lock. So a step waits for the lock only this long, and is tried again. What is
# left is empty and costs nothing until the next hour.
_CHANGE_LOCK_SECONDS = 0.05
_LOCK_SECONDS = 0.2
_STATEMENT_SECONDS = 60.0
_TRIES = 20
_PAUSE_SECONDS = 0.1
# Rows moved into a partition of their own; completing jobs of that day waits meanwhile.
_MOVED_ROWS = 10_000
_DELETED_ROWS = 10_000
_CANCELLATION_SECONDS = 3_600.0
_CLAIM_SECONDS = 3_600.0


@dataclass(slots=True)
class Maintained:
    """The result of :func:`maintain`."""

    made: int = 0
    """Days that got a partition."""
    dropped: int = 0
    """Days that were dropped whole."""
    deleted: int = 0
    """Deleted rows whose time was over and which lay in no day's partition."""
    left: int = 0
    """Steps whose locks could not be taken; the next call tries again."""
    skipped: bool = False
    """Whether another process was maintaining, so that nothing was done here."""


class _Busy(Exception):
    """Another process maintains the history."""


def maintain(database: Database, keep: Iterable[int] = (1,)) -> Maintained:
    """Make the history's next days and drop those whose time is over.

    Args:
        database: where the history is.
        keep: the numbers of days for which job types keep finished jobs.

    Raises:
        UnavailableError: the database does not answer.
        OperatingError: a number of days is out of range.
    """
    kept = sorted({days for days in keep if days})
    if any(not 1 <= days <= 3_660 for days in kept):
        raise OperatingError(f"the history keeps 1 to 3,660 days, not {kept}")
    done = Maintained()
    with database.connect_for_upkeep() as connection:
        try:
            _maintain(connection, database, kept, done)
        except _Busy:
            done.skipped = True
        except LockNotAvailable:
            # Such as while a migration changes a table; the steps behind are left, too.
            done.left += 1
    return done


def _maintain(
    connection: psycopg.Connection[Any],
    database: Database,
    kept: list[int],
    done: Maintained,
) -> None:
    queries = database.queries
    with _step(connection, database):
        (today,) = connection.execute(queries["today"]).fetchone() or (None,)
        rows = connection.execute(
            queries["history_days"], {"schema": database.schema}
        ).fetchall()
        connection.execute(
            queries["forget_cancellations"], {"after": _CANCELLATION_SECONDS}
        )
    assert today is not None
    apart = {day for day, _, is_apart in rows if is_apart}
    stray = {day for day, over, is_apart in rows if not (is_apart or over)}
    # Make tomorrow's, too: at midnight no row may be left without a day's partition.
    wanted = {today + timedelta(days=n + ahead) for n in kept for ahead in (0, 1)}
    for day in sorted((wanted | stray) - apart):
        _make(connection, database, day, done)
    for day in sorted(day for day, over, is_apart in rows if is_apart and over):
        _drop(connection, database, day, done)
    if any(over and not is_apart for _, over, is_apart in rows):
        _delete(connection, database, done)
    with _step(connection, database):
        connection.execute(queries["forget_orphaned_claims"], {"after": _CLAIM_SECONDS})


def _make(
    connection: psycopg.Connection[Any],
    database: Database,
    day: date,
    done: Maintained,
) -> None:
    asked = {"day": day, "most": _MOVED_ROWS}
    try:
        done.made += _change(connection, database, "make_history", asked) == ("made",)
    except LockNotAvailable:
        done.left += 1


def _drop(
    connection: psycopg.Connection[Any],
    database: Database,
    day: date,
    done: Maintained,
) -> None:
    try:
        with _step(connection, database):
            connection.execute(database.queries["empty_history"], {"day": day})
        _change(connection, database, "drop_history", {"day": day})
        done.dropped += 1
    except LockNotAvailable:
        done.left += 1
    except UndefinedTable:
        return  # another process was faster


def _change(
    connection: psycopg.Connection[Any],
    database: Database,
    query: str,
    parameters: dict[str, Any],
) -> Any:
    """Change the set of days: transactions that write wait while this one waits."""
    for left in reversed(range(_TRIES)):
        try:
            with _step(connection, database, _CHANGE_LOCK_SECONDS):
                return connection.execute(
                    database.queries[query], parameters
                ).fetchone()
        except LockNotAvailable:
            if not left:
                raise
            time.sleep(_PAUSE_SECONDS)
    return None


def _delete(
    connection: psycopg.Connection[Any], database: Database, done: Maintained
) -> None:
    while True:
        with _step(connection, database):
            deleted = connection.execute(
                database.queries["delete_history"], {"limit": _DELETED_ROWS}
            ).rowcount
        done.deleted += deleted
        if deleted < _DELETED_ROWS:
            return


@contextmanager
def _step(
    connection: psycopg.Connection[Any],
    database: Database,
    lock: float = _LOCK_SECONDS,
) -> Iterator[None]:
    queries = database.queries
    with connection.transaction():
        connection.execute(
            queries["bound_statements"],
            {
                "statement_ms": str(round(_STATEMENT_SECONDS * 1000)),
                "lock_ms": str(round(lock * 1000)),
            },
        )
        mine = connection.execute(
            queries["lock_maintenance"], {"schema": database.schema}
        ).fetchone()
        if mine != (True,):
            raise _Busy
        yield
