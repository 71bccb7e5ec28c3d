"""Discarded jobs: run them again, or delete them, one or many."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from jobs_lib.errors import OperatingError
from jobs_lib.operating.listing import Filter
from jobs_lib.operating.session import bounded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from jobs_lib.db import Database

# A transaction each: short enough that nobody who enqueues waits for it.
BATCH = 1_000


@dataclass(slots=True)
class Retried:
    """What :func:`retry_discarded` did."""

    retried: int = 0
    conflicts: list[int] = field(default_factory=list)
    """Still discarded, because another unfinished job has their unique key."""


def retry_discarded(
    database: Database,
    ids: Iterable[int] | None = None,
    filter: Filter | None = None,
    *,
    batch: int = BATCH,
) -> Retried:
    """Run discarded jobs again, with a fresh count of attempts.

    A job keeps its id, and so its idempotency key and its place: in its group it comes
    before those that were enqueued after it. Its errors are kept.

    Args:
        database: where they are.
        ids: which. Defaults to all that the filter leaves.
        filter: which of them. Defaults to all.
        batch: how many in one transaction. What was done stays done if a later one
            fails; the same call again goes on.

    Raises:
        OperatingError: locks were not to be had within five seconds.
    """
    done = Retried()
    for rows in _batches(database, "retry_discarded", ids, filter, batch):
        done.retried += sum(moved for _, moved in rows)
        done.conflicts += [job for job, moved in rows if not moved]
    return done


def delete_discarded(
    database: Database,
    ids: Iterable[int] | None = None,
    filter: Filter | None = None,
    *,
    batch: int = BATCH,
) -> int:
    """Delete discarded jobs for good; returns how many. The arguments are as above.

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
