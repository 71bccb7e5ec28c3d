"""Which jobs there are, in every state, and one of them with all that is known."""

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
    """Which jobs are meant; what is None does not matter."""

    type: str | None = None
    group: str | None = None
    origin: str | None = None
    error: str | None = None
    """A part of the last error's text, in any case. Only discarded jobs have one."""
    since: datetime | None = None
    """Discarded, or finished, at this time or later."""

    def __bool__(self) -> bool:
        """Whether it leaves anything out."""
        return any(value is not None for value in asdict(self).values())


@dataclass(frozen=True, slots=True)
class Listed:
    """A job as a list shows it."""

    id: int
    type: str
    origin: str
    group: str | None
    state: str
    """``running`` jobs are claimed: they run, or are next. ``waiting`` ones stand
    behind an unfinished job of their group."""
    attempt: int
    """Failed attempts so far; of a finished job, all of them."""
    priority: int | None
    at: datetime | None
    """When a scheduled job is due, or when it was discarded or finished."""
    enqueued_at: datetime
    error: str | None
    """The last one."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A job with all that is known of it. Of a finished one, the history keeps less."""

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
    """Which pod has claimed it."""


def list_jobs(
    database: Database,
    state: str | None = None,
    filter: Filter | None = None,
    *,
    after: int = 0,
    limit: int = 50,
) -> list[Listed]:
    """Some jobs, by id; scheduled ones as they become due, finished ones newest first.

    Args:
        database: where to look.
        state: one of ``STATES``. Defaults to all that are unfinished.
        filter: which of them.
        after: only ids above this one, to go on after a full page.
        limit: how many at the most, 1 to 1,000.

    Raises:
        OperatingError: there is no such state, the limit is out of range, the filter
            does not fit the state, or the look took longer than ten seconds.
    """
    if state is not None and state not in STATES:
        raise OperatingError(f"no job is ever {state!r}: one of {', '.join(STATES)}")
    if not 1 <= limit <= LIMIT:
        raise OperatingError(f"the limit must be 1 to {LIMIT:,}, not {limit}")
    chosen = filter or Filter()
    _check_filter(state, chosen)
    values = {**asdict(chosen), "state": state, "after": after, "limit": limit}
    if state in FINISHED:
        query = "list_history"
    elif state in ("scheduled", "running", "discarded"):
        query = f"list_{state}"
    else:
        query = "list_unfinished"
    with database.connect("jobs") as connection, bounded(connection, database):
        rows = connection.execute(database.queries[query], values).fetchall()
    return [Listed(*row) for row in rows]


def show_job(database: Database, job: int) -> Shown | None:
    """A job with its payload and errors; None where no table has it."""
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
