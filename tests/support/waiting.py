"""Wait for a condition with a deadline: the only place where a test sleeps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# Short enough not to be felt, long enough to leave the cores to what is tested.
_PAUSE_SECONDS = 0.01


def wait_for(
    condition: Callable[[], T],
    *,
    timeout: float = 15.0,
    what: str | Callable[[], str] = "the condition holds",
) -> T:
    """Call ``condition`` until it gives something true, and return that.

    The test fails after ``timeout`` seconds with ``what``, which may be a function so
    that it can tell how things stand then.
    """
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout
    while True:
        # Looked at before the look: a slow condition gets its last chance.
        late = time.monotonic() >= deadline
        if result := condition():
            return result
        if late:
            told = what if isinstance(what, str) else what()
            pytest.fail(f"waited {timeout:g} s in vain until: {told}")
        time.sleep(_PAUSE_SECONDS)


def linger(seconds: float) -> None:
    """Let time pass, while faults are at work."""
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() >= until, timeout=seconds + 5)
