"""The record that the thread or task handles now, for the jobs that it enqueues."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

handled: ContextVar[str | None] = ContextVar("jobs_lib_origin", default=None)
"""For hot loops; other code uses the functions below."""


def current_origin() -> str | None:
    """The origin ``topic/partition`` of the record that is handled; None outside."""
    return handled.get()


@contextmanager
def handling(origin: str) -> Iterator[None]:
    """Mark that a record of ``origin`` is handled inside the block."""
    token = handled.set(origin)
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
