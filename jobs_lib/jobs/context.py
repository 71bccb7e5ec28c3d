"""What the thread is doing now, for what it enqueues."""

from __future__ import annotations

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
