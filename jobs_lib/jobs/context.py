"""What the thread or task is doing now, for what it enqueues."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

handled: ContextVar[str | None] = ContextVar("jobs_lib_origin", default=None)
"""For hot loops; all others use the functions below."""


def current_origin() -> str | None:
    """The origin ``topic/partition`` of the record being handled; None outside one."""
    return handled.get()


@contextmanager
def handling(origin: str) -> Iterator[None]:
    """Mark that a record of ``origin`` is being handled."""
    token = handled.set(origin)
    try:
        yield
    finally:
        handled.reset(token)


def trace_headers() -> dict[str, str]:
    """The headers of the active OpenTelemetry span; none without one.

    They are those of the propagators that the application has chosen: by default
    ``traceparent``, and ``tracestate`` and ``baggage`` where there is some.
    """
    # A span can be active only where somebody has imported this: we never do first.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return {}
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier
