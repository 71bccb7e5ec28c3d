"""A job as its handler sees it, and the errors that a handler may raise."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID, uuid5

from jobs_lib.errors import ConfigurationError, JobsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import psycopg


class JobTransaction(Protocol):
    """A job's own transaction, for ``with`` or ``async with``."""

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
    """1 for the first attempt. Attempts that were not the job's fault do not count."""
    crashes: int
    """Processes that died while it may have been running, since its last failure."""
    priority: int
    """1 high, 0 normal, -1 batch."""
    payload: str | None = field(repr=False)
    """The payload as JSON text; None for a large payload, until the job starts."""
    run_at: datetime | None
    enqueued: float = field(repr=False)
    """When it was enqueued, by the database's clock, in seconds since the epoch."""
    headers: dict[str, str] | None = field(repr=False)
    """Context that travels with the job, such as a trace."""
    origin: str
    """The origin ``topic/partition``, whose owner runs the job."""
    installation: UUID = field(repr=False)
    """The database that holds the job: ids are unique only there."""
    cancel_requested: bool = field(default=False, init=False)
    """Set when cancelling was requested: long handlers check it, and raise Cancel."""
    timed_out: bool = field(default=False, init=False)
    """Set when its time limit is over: the handler's further writes are refused."""
    lend: Callable[[Any], JobTransaction] | None = field(
        default=None, init=False, repr=False
    )
    """Gives the job its transaction; None if there is none to give."""

    def __str__(self) -> str:
        """Name the job in logs."""
        return f"{self.id} ({self.type})"

    @property
    def enqueued_at(self) -> datetime:
        """When it was enqueued, by the database's clock."""
        return datetime.fromtimestamp(self.enqueued, UTC)

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this job, different for any other job."""
        # The time makes it unique: a server that lost commits reuses their ids.
        enqueued = round(self.enqueued * 1_000_000)
        return str(uuid5(self.installation, f"{self.id}/{enqueued}"))

    def ensure_may_publish(self) -> None:
        """Refuse to publish an event of a stream for a job that is over.

        Raises:
            ConfigurationError: the job has no group, which gives its events an order.
            JobsError: its time limit is over, or its completion is committed.
        """
        if self.group is None:
            raise ConfigurationError(
                f"job {self.id} of {self.type!r} publishes and has no group, so an "
                "older state of an entity could be sent behind a newer one: declare "
                "the type with a group for each entity"
            )
        if self.timed_out:
            raise JobsError(f"job {self.id} publishes after its time limit was over")

    def transaction(self) -> JobTransaction:
        """Open the job's own transaction: what is written in it commits with the job.

        Use ``with`` in a plain handler and ``async with`` in an async one.

        Leaving the block without an error completes the job and commits, in one round
        trip and only if this process still owns the job's origin: the effect happens
        exactly once in this database. It can be used once in each attempt.

        Raises:
            FencedError: on leaving, if another process has taken over; nothing that was
                written is kept, and the job runs there.
        """
        if self.lend is None:
            raise JobsError(
                f"job {self.id} has no transaction to give: it was given already, or "
                "no executor runs the job"
            )
        lend, self.lend = self.lend, None
        return lend(self)


class Snooze(JobsError):
    """Raise in a handler to run the job again in ``seconds``; costs no attempt."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        if not 0 <= seconds <= 366 * 86_400:
            raise ValueError(f"snooze for 0 seconds to one year, not {seconds}")
        super().__init__(reason or f"snoozed for {seconds:g} s")
        # Always a float: the driver takes no list of integers and floats mixed.
        self.seconds = float(seconds)


class RateLimited(Snooze):
    """A rate limit lets the job run no earlier than in ``seconds``."""


class RetryAfter(JobsError):
    """Raise in a handler that fails, to choose the time of the next attempt."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        if not 0 <= seconds <= 366 * 86_400:
            raise ValueError(f"retry after 0 seconds to one year, not {seconds}")
        super().__init__(reason or f"to be retried after {seconds:g} s")
        self.seconds = float(seconds)


class Cancel(JobsError):
    """Raise in a handler to cancel the job: it is neither completed nor kept."""


class Discard(JobsError):
    """Raise in a handler to give the job up for good; it is kept and can be listed."""
