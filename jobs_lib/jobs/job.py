"""A job as its handler sees it, and what a handler may raise."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID, uuid5

from jobs_lib.errors import JobsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import psycopg


class JobTransaction(Protocol):
    """A job's own transaction: by ``with``, or by ``async with``."""

    def __enter__(self) -> psycopg.Connection[tuple[Any, ...]]: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None: ...

    async def __aenter__(self) -> psycopg.AsyncConnection[tuple[Any, ...]]: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None: ...


@dataclass(slots=True, eq=False)
class Job:
    """One job as its handler sees it."""

    id: int
    type: str
    group: str | None
    attempt: int
    """1 for the first attempt; attempts that were not the job's fault do not count."""
    crashes: int
    """Processes that died while it may have been running, since its last failure."""
    priority: int
    """1 high, 0 normal, -1 batch."""
    payload: str | None = field(repr=False)
    """The payload as JSON text; None for a large one, until the job starts."""
    run_at: datetime | None
    enqueued: float = field(repr=False)
    """Seconds since the epoch at which it was enqueued, by the database's clock."""
    headers: dict[str, str] | None = field(repr=False)
    """Context that travels with the job, such as a trace."""
    origin: str
    """The origin ``topic/partition``, whose owner runs the job."""
    installation: UUID = field(repr=False)
    """The database that holds the job: ids are unique only there."""
    cancel_requested: bool = field(default=False, init=False)
    """Set when somebody asked to cancel it: a long handler looks, and raises Cancel."""
    timed_out: bool = field(default=False, init=False)
    """Set when its time limit is over: whatever the handler still does is refused."""
    lend: Callable[[Any], JobTransaction] | None = field(
        default=None, init=False, repr=False
    )
    """Gives the job its transaction; None where that is not to be had."""

    def __str__(self) -> str:
        """What a log needs to know of it."""
        return f"{self.id} ({self.type})"

    @property
    def enqueued_at(self) -> datetime:
        """When it was enqueued, by the database's clock."""
        return datetime.fromtimestamp(self.enqueued, UTC)

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this job, different for any other job."""
        # A server that has lost commits gives their ids once more, at another time.
        enqueued = round(self.enqueued * 1_000_000)
        return str(uuid5(self.installation, f"{self.id}/{enqueued}"))

    def transaction(self) -> JobTransaction:
        """The job's own transaction: what is written in it commits with the job.

        For ``with`` in a plain handler, for ``async with`` in an async one.

        Leaving the block without an error completes the job and commits, both in one
        round trip and only if this process still owns the job's origin: the effect is
        exactly once in this database. Usable once per attempt.

        Raises:
            FencedError: on leaving, when another process has taken over; nothing that
                was written is kept, and the job runs there.
        """
        if self.lend is None:
            raise JobsError(
                f"job {self.id} has no transaction to give: it was given already, or "
                "the job is not being run by an executor"
            )
        lend, self.lend = self.lend, None
        return lend(self)


class Snooze(JobsError):
    """Raise in a handler to run the job again in ``seconds``; burns no attempt."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        if not 0 <= seconds <= 366 * 86_400:
            raise ValueError(f"snooze for 0 seconds to one year, not {seconds}")
        super().__init__(reason or f"snoozed for {seconds:g} s")
        # Not as given: a list of whole and of broken numbers is none to the driver.
        self.seconds = float(seconds)


class RateLimited(Snooze):
    """A limit of rate lets the job run no earlier than in ``seconds``."""


class RetryAfter(JobsError):
    """Raise in a handler that failed, to choose the time of the next attempt."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        if not 0 <= seconds <= 366 * 86_400:
            raise ValueError(f"retry after 0 seconds to one year, not {seconds}")
        super().__init__(reason or f"to be retried after {seconds:g} s")
        self.seconds = float(seconds)


class Cancel(JobsError):
    """Raise in a handler to end the job: it is neither completed nor kept."""


class Discard(JobsError):
    """Raise in a handler to give the job up for good; it is kept and can be listed."""
