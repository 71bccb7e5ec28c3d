"""Discarded jobs: move them back among those that wait, or delete them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from jobs_lib.errors import OperatingError
from jobs_lib.operating.listing import Filter
from jobs_lib.operating.session import bounded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from jobs_lib.postgres.database import Database

# A transaction each: short enough that nobody who enqueues waits for it.
BATCH = 1_000


def move_discarded(
    database: Database,
    ids: Iterable[int] | None,
    filter: Filter | None,
    *,
    batch: int = BATCH,
) -> Iterator[tuple[int, bool]]:
    """Run discarded jobs again; each id, and whether it could be moved back.

    It could not be where another unfinished job has its unique key. The arguments, and
    what is raised, are those of :func:`jobs_lib.operating.retry`.
    """
    for rows in _batches(database, "retry_discarded", ids, filter, batch):
        yield from rows


def delete_discarded(
    database: Database,
    ids: Iterable[int] | None = None,
    filter: Filter | None = None,
    *,
    batch: int = BATCH,
) -> int:
    """Delete discarded jobs for good; returns how many.

    Args:
        database: where they are.
        ids: which. Defaults to all that the filter leaves.
        filter: which of them. Defaults to all.
        batch: how many in one transaction. What was done stays done if a later one
            fails; the same call again goes on.

    Raises:
        OperatingError: locks were not to be had within five seconds.
    """
    batches = _batches(database, "delete_discarded", ids, filter, batch)
    return sum(len(rows) for rows in batches)


def _batches(
    database: Database,
    query: str,
    ids: Iterable[int] | None,
    filter: Filter | None,
    batch: int,
) -> Iterator[list[tuple[int, bool]]]:
    if batch < 1:
        raise OperatingError(f"a batch has 1 job or more, not {batch}")
    queries = database.queries
    with database.connect("discarded") as connection:
        now = connection.execute(queries["database_time"]).fetchone()
        assert now is not None
        values = {
            **asdict(filter or Filter()),
            "ids": None if ids is None else sorted(set(ids)),
            # One that fails again meanwhile is not taken a second time.
            "until": now[0],
            "after": 0,
            "limit": batch,
        }
        while True:
            with bounded(connection, database):
                if query == "retry_discarded":
                    # A statement of its own: what follows sees each move that was
                    # committed until then.
                    connection.execute(queries["hold_home"])
                rows = connection.execute(queries[query], values).fetchall()
            if not rows:
                return
            yield [(int(job), bool(moved)) for job, moved in rows]
            values["after"] = max(job for job, _ in rows)
