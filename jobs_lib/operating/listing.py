"""List jobs in every state, and show everything that is known about one job."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from jobs_lib.errors import OperatingError
from jobs_lib.operating.session import bounded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from jobs_lib.postgres.database import Database

UNFINISHED = ("available", "scheduled", "running", "waiting")
FINISHED = ("completed", "cancelled", "superseded")
STATES = (*UNFINISHED, "discarded", *FINISHED)
LIMIT = 1_000


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects jobs; a field that is None does not matter."""

    type: str | None = None
    group: str | None = None
    origin: str | None = None
    error: str | None = None
    """A part of the last error's text, in upper or lower case; for discarded jobs."""
    since: datetime | None = None
    """Selects jobs discarded or finished at this time or later."""

    def __bool__(self) -> bool:
        """Whether it excludes any jobs."""
        return any(value is not None for value in asdict(self).values())


@dataclass(frozen=True, slots=True)
class Listed:
    """A job, as lists show it."""

    id: int
    type: str
    origin: str
    group: str | None
    state: str
    """``running`` jobs are claimed: they run, or are next. ``waiting`` jobs are behind
    an unfinished job of their group."""
    attempt: int
    """Failed attempts so far; for a finished job, all attempts."""
    priority: int | None
    at: datetime | None
    """When a scheduled job is due, or when it was discarded or finished."""
    enqueued_at: datetime
    error: str | None
    """The last error."""


@dataclass(frozen=True, slots=True)
class Shown:
    """All that is known about a job. For finished jobs the history keeps less."""

    id: int
    type: str
    origin: str
    group: str | None
    state: str
    attempt: int
    priority: int | None
    payload: Any = field(repr=False)
    headers: dict[str, str] | None = field(repr=False)
    unique_key: str | None
    enqueued_at: datetime
    run_at: datetime | None
    ended_at: datetime | None
    """When it was discarded or finished."""
    errors: list[dict[str, Any]] | None
    """Its last failures, newest last: ``attempt``, ``at``, ``error``."""
    pod: str | None
    """The pod that has claimed it."""


def list_jobs(
    database: Database,
    state: str | None = None,
    filter: Filter | None = None,
    *,
    after: int = 0,
    limit: int = 50,
) -> list[Listed]:
    """List jobs by id; scheduled ones by due time, finished ones newest first.

    Args:
        database: where the jobs are.
        state: one of ``STATES``. Defaults to all unfinished ones.
        filter: selects jobs.
        after: the id of the last job of a page, to go on with the next one; 0 for the
            first page. In a list by id that job need not be there any more.
        limit: the number of jobs at most, 1 to 1,000.

    Raises:
        OperatingError: there is no such state, the limit is out of range, the filter
            does not fit the state, the job of ``after`` has left a list by time, or
            the query took longer than ten seconds.
    """
    if state is not None and state not in STATES:
        raise OperatingError(f"no job is ever {state!r}: one of {', '.join(STATES)}")
    if not 1 <= limit <= LIMIT:
        raise OperatingError(f"the limit must be 1 to {LIMIT:,}, not {limit}")
    chosen = filter or Filter()
    _check_filter(state, chosen)
    values = {**asdict(chosen), "state": state, "after": after, "limit": limit}
    if state in FINISHED:
        query, by_time = "history", True
    elif state in ("scheduled", "running", "discarded"):
        query, by_time = state, state == "scheduled"
    else:
        query, by_time = "unfinished", False
    queries = database.queries
    with database.connect("jobs") as connection, bounded(connection, database):
        if by_time:
            place = None
            if after:
                found = connection.execute(queries[f"place_in_{query}"], values)
                place = found.fetchone()
                if place is None:
                    raise OperatingError(
                        f"job {after} is not in the list of {state} jobs, which is by "
                        "time: begin again without it, or go on behind another one"
                    )
            values["at"] = place and place[0]
        rows = connection.execute(queries[f"list_{query}"], values).fetchall()
    return [Listed(*row) for row in rows]


def show_job(database: Database, job: int) -> Shown | None:
    """Show a job with its payload and errors; None if no table has it."""
    with database.connect("jobs") as connection, bounded(connection, database):
        for query in ("show_unfinished", "show_discarded", "show_finished"):
            row = connection.execute(database.queries[query], {"id": job}).fetchone()
            if row is not None:
                return Shown(*cast("Sequence[Any]", row))
    return None


def _check_filter(state: str | None, filter: Filter) -> None:
    if filter.error is not None and state != "discarded":
        raise OperatingError("only discarded jobs are listed by their error")
    if filter.since is not None and state not in (*FINISHED, "discarded"):
        raise OperatingError(
            f"only {', '.join(FINISHED)} and discarded jobs are listed by time"
        )
