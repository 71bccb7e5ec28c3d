"""Middleware: an application's own code around each enqueue and each run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from jobs_lib.jobs.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime, timedelta

    from jobs_lib.jobs.job import Job
    from jobs_lib.jobs.options import Priority

    RunMiddleware = Callable[[Job, Callable[[], Any]], Any]
    """Middleware: called with the job, and a function that runs the handler."""

T = TypeVar("T")


@dataclass(slots=True)
class Draft:
    """The jobs that one call is about to enqueue. Middleware changes all but the type.

    They are checked after the middleware, and before any SQL.
    """

    type: str
    payloads: list[dict[str, Any]] = field(repr=False)
    """The handler's arguments by name, for one job or for all of ``enqueue_many``."""
    headers: dict[str, str] = field(repr=False)
    run_at: datetime | None
    origin: str | None
    ordered: bool
    priority: Priority
    unique: str | None
    delay: timedelta | float | None = None

    def options(self) -> Options:
        """Check the current options, and return them."""
        return Options(
            self.type,
            self.run_at,
            self.origin,
            self.ordered,
            self.priority,
            self.unique,
            self.headers,
            self.delay,
        )


class EnqueueMiddleware(Protocol):
    """Middleware: does something, calls ``call_next`` and returns its result.

    The result is the job's id (or the number of jobs); with an asynchronous connection
    it must be awaited.
    """

    def __call__(self, draft: Draft, call_next: Callable[[Draft], T], /) -> T:
        """Enqueue the draft."""
        ...


def call_middleware(
    middleware: Sequence[EnqueueMiddleware], draft: Draft, enqueue: Callable[[Draft], T]
) -> T:
    """Enqueue the draft inside all middleware; the first one is the outermost."""
    if not middleware:
        return enqueue(draft)
    first, *others = middleware
    return first(draft, lambda inner: call_middleware(others, inner, enqueue))
