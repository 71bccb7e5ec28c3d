"""What the thread or task handles now, for the jobs that it enqueues."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Holder(Protocol):
    """What gives its places to new jobs."""

    def name_places(self) -> str | None:
        """Name whose places these are, as the SQL function ``insert_job`` reads it."""


class Handled(Holder, Protocol):
    """What is handled: a job, or records."""

    @property
    def origin(self) -> str | None:
        """Its origin ``topic/partition``; None outside of one."""


class Place:
    """Whose places new jobs get, while a record is handled or jobs run."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text: str | None = text
        """None when the call is over, for what it has left behind."""

    def name_places(self) -> str | None:
        """Name the record or the jobs."""
        return self.text


class Handling:
    """Records that are handled, or jobs that are together.

    Args:
        origin: where they come from.
        holder: whose places new jobs get; None if nobody tells how far they are done.
    """

    __slots__ = ("holder", "origin")

    def __init__(self, origin: str | None, holder: Holder | None) -> None:
        self.origin = origin
        self.holder = holder

    def name_places(self) -> str | None:
        """Name the holder's places."""
        return None if self.holder is None else self.holder.name_places()


handled: ContextVar[Handled | None] = ContextVar("jobs_lib_handled", default=None)
"""For hot loops; other code uses the functions below.

One variable for both: each more costs a job that does nothing a hundredth of its time.
"""


def current_place() -> str | None:
    """Whose places new jobs get; None if nobody tells how far its jobs are done."""
    now = handled.get()
    return None if now is None else now.name_places()


@contextmanager
def holding(place: Place | None) -> Iterator[None]:
    """Let the jobs that are enqueued inside the block get these places."""
    if place is None:
        yield
        return
    token = handled.set(Handling(current_origin(), place))
    try:
        yield
    finally:
        handled.reset(token)
        place.text = None


def current_origin() -> str | None:
    """The origin ``topic/partition`` of the record that is handled; None outside."""
    now = handled.get()
    return None if now is None else now.origin


@contextmanager
def handling(origin: str) -> Iterator[None]:
    """Mark that a record of ``origin`` is handled inside the block."""
    token = handled.set(Handling(origin, handled.get()))
    try:
        yield
    finally:
        handled.reset(token)


def trace_headers() -> dict[str, str]:
    """The headers of the active OpenTelemetry span; none without one.

    The application's propagators write them: by default ``traceparent``, and
    ``tracestate`` and ``baggage`` if there are any.
    """
    # A span can be active only if the application has imported this package already.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return {}
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier
