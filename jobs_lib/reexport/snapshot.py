"""One snapshot of the table for all readers of a load, held by the loader.

While a snapshot is held, VACUUM removes no row that was deleted since, in the whole
database. So it is only for loads that end soon, and is given up after a time.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg import sql

from jobs_lib.errors import ReexportError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.reexport.run import Begun

HOLD_SECONDS = 600.0
"""For how long a snapshot is held by default, at most."""
_SERVER_WAITS = 30.0
"""Seconds more for the server, which ends a holder that does not do so itself."""
_SLOWEST = 5_000
"""Keys that even a slow machine loads in a second."""
_GONE = (
    psycopg.errors.UndefinedObject,
    psycopg.errors.InvalidParameterValue,
    psycopg.errors.ObjectNotInPrerequisiteState,
)
"""The server's answers, by its release and by what has become of the holder."""


class Hold(NamedTuple):
    """How long a snapshot may be held.

    Attributes:
        seconds: at most.
        ahead: keys that may be loaded and not yet sent.
    """

    seconds: float
    ahead: int


def check_hold(database: Database, hold: Hold) -> None:
    """Refuse a time that cannot be, and a database that lends no session.

    Raises:
        ReexportError: so it is.
    """
    if not 0 < hold.seconds <= 24 * 3600:
        raise ReexportError(
            f"a snapshot is held for more than 0 seconds and at most a day, not "
            f"{hold.seconds:g}"
        )
    if not database.listens:
        raise ReexportError(
            "one snapshot needs a session of its own for the whole load, which "
            "PgBouncer does not lend: set JOBS_LIB_DIRECT_URL, or start without the "
            "snapshot"
        )


def check_keys(keys: int, hold: Hold) -> None:
    """Refuse a load that would hold its snapshot for too long.

    Raises:
        ReexportError: it has to wait until keys are sent, or takes longer.
    """
    if keys > hold.ahead:
        raise ReexportError(
            f"{keys:,} keys are more than the {hold.ahead:,} that may be loaded ahead, "
            "so the load would wait for records to be sent, and hold its snapshot "
            "for as long: allow more keys ahead, or start without the snapshot"
        )
    if keys > hold.seconds * _SLOWEST:
        raise ReexportError(
            f"the load of {keys:,} keys may take {keys / _SLOWEST:,.0f} seconds (at "
            f"{_SLOWEST:,} keys a second), and its snapshot may be held for "
            f"{hold.seconds:,.0f}: allow more time, or start without the snapshot"
        )


def refuse_lost(reexport: int, loaded: int) -> ReexportError:
    """The error about a resumed load: ranges of two moments are no snapshot."""
    return ReexportError(
        f"the re-export {reexport} has loaded {loaded} ranges, and a snapshot ends "
        "with its loader, so the other ranges would be of another moment: start "
        "without the snapshot to load them as they are now, or cancel it and start "
        "again"
    )


@contextmanager
def hold_snapshot(database: Database, begun: Begun, seconds: float) -> Iterator[Begun]:
    """Hold a snapshot; what is begun is then loaded as it shows the table.

    Raises:
        ReexportError: ranges are loaded already, or the time was over before the last
            one was.
    """
    queries = database.queries
    expired = threading.Event()
    with database.connect("re-export snapshot", direct=True) as connection:

        def give_up() -> None:
            expired.set()
            # Nothing else uses it, so a thread may close it.
            connection.close()

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        connection.execute(queries["begin_snapshot"])
        limit = f"{(seconds + _SERVER_WAITS) * 1_000:.0f}ms"
        row = connection.execute(
            queries["export_snapshot"], {"limit": limit}
        ).fetchone()
        assert row is not None
        timer.start()
        try:
            _note(database, begun.id, row[0])
            yield replace(begun, loading=replace(begun.loading, snapshot=row[0]))
        except Exception as error:
            if expired.is_set():
                raise ReexportError(
                    f"the snapshot of the re-export {begun.id} was held for "
                    f"{seconds:,.0f} seconds and is given up; what is loaded stays. "
                    "Start without the snapshot to load the rest as it is now, or "
                    "cancel it and start again with more time"
                ) from error
            raise
        finally:
            timer.cancel()
            connection.close()


@contextmanager
def reading(
    connection: psycopg.Connection[Any], queries: Queries, snapshot: str
) -> Iterator[None]:
    """Open a transaction that sees the table as the snapshot shows it.

    Raises:
        ReexportError: nobody holds it any more.
    """
    connection.execute(queries["begin_snapshot"])
    try:
        try:
            # It must be the first statement, and takes no parameters.
            statement = sql.SQL("set transaction snapshot {}")
            connection.execute(statement.format(sql.Literal(snapshot)), prepare=False)
        except _GONE:
            raise ReexportError(
                f"the snapshot {snapshot!r} is no longer held: the loader that held it "
                "has ended. Start the re-export again"
            ) from None
        connection.execute(queries["limit_loader"])
        yield
    finally:
        connection.rollback()


def _note(database: Database, reexport: int, snapshot: str) -> None:
    """Write down whose snapshot the ranges are of; other loaders are refused then."""
    queries = database.queries
    this = {"reexport": reexport}
    with (
        database.connect("re-export") as connection,
        connection.transaction(),
    ):
        # First the lock: then no other loader's range is committed meanwhile.
        connection.execute(queries["lock_reexport"], this)
        row = connection.execute(queries["count_loaded_ranges"], this).fetchone()
        loaded, ranges = row or (0, 0)
        if 0 < loaded < ranges:
            raise refuse_lost(reexport, loaded)
        if loaded < ranges:
            values = this | {"snapshot": snapshot}
            connection.execute(queries["note_snapshot"], values)
