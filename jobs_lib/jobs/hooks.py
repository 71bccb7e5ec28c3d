"""Hooks around enqueue: what the application does with every job that it enqueues."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from jobs_lib.jobs.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime, timedelta

    from jobs_lib.jobs.job import Job
    from jobs_lib.jobs.options import Priority

    Around = Callable[[Job, Callable[[], Any]], Any]
    """Called around a handler: with the job, and a function that runs the handler."""

T = TypeVar("T")


@dataclass(slots=True)
class Draft:
    """What is about to be enqueued by one call. Hooks may change all but the type.

    It is checked after the hooks, and before any SQL.
    """

    type: str
    payloads: list[dict[str, Any]] = field(repr=False)
    """The handler's arguments by name: of one job, or of all of ``enqueue_many``."""
    headers: dict[str, str] = field(repr=False)
    run_at: datetime | None
    origin: str | None
    ordered: bool
    priority: Priority
    unique: str | None
    delay: timedelta | float | None = None

    def options(self) -> Options:
        """The options as they are now, checked."""
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


class AroundEnqueue(Protocol):
    """A hook: does something, calls ``call_next`` and returns what that returns.

    That is the job's id (or the number of jobs), and with an asynchronous connection
    something to be awaited for it.
    """

    def __call__(self, draft: Draft, call_next: Callable[[Draft], T], /) -> T:
        """Enqueue the draft."""
        ...


def call_around(
    hooks: Sequence[AroundEnqueue], draft: Draft, enqueue: Callable[[Draft], T]
) -> T:
    """Enqueue the draft inside all hooks; the first one is the outermost."""
    if not hooks:
        return enqueue(draft)
    return hooks[0](draft, lambda inner: call_around(hooks[1:], inner, enqueue))
