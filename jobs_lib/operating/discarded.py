"""Move discarded jobs back among the waiting ones, or delete them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from jobs_lib.errors import OperatingError
from jobs_lib.operating.listing import Filter
from jobs_lib.operating.session import bounded, describe_batches, read_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from jobs_lib.postgres.database import Database

# Jobs in one transaction: few enough that enqueuing does not notice the wait.
BATCH = 1_000


def move_discarded(
    database: Database,
    ids: Iterable[int] | None,
    filter: Filter | None,
    *,
    batch: int,
) -> Iterator[tuple[int, bool]]:
    """Run discarded jobs again; yields each id, and whether it could be moved back.

    It cannot if another unfinished job has its unique key. Arguments and errors are
    those of :func:`jobs_lib.operating.retry`.
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
        database: where the jobs are.
        ids: the jobs. Defaults to all that the filter selects.
        filter: selects among them. Defaults to all.
        batch: jobs in one transaction. If a later transaction fails, the earlier ones
            stay done; call again to go on.

    Raises:
        OperatingError: locks could not be taken within five seconds.
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
        values = {
            **asdict(filter or Filter()),
            "ids": None if ids is None else sorted(set(ids)),
            # A job that fails again meanwhile is not taken a second time.
            "until": read_time(connection, database),
            "after": 0,
            "limit": batch,
        }
        done = 0
        while True:
            with bounded(connection, database, so_far=describe_batches(done)):
                if query == "retry_discarded":
                    # A statement of its own: the next one then sees every move that
                    # was committed before it.
                    connection.execute(queries["hold_home"])
                rows = connection.execute(queries[query], values).fetchall()
            if not rows:
                return
            done += len(rows)
            yield [(int(job), bool(moved)) for job, moved in rows]
            values["after"] = max(job for job, _ in rows)
