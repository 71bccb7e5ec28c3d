"""Wait for a condition with a deadline: the only place where a test sleeps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# The pause is short enough not to be felt, and leaves the cores to the tested code.
_PAUSE_SECONDS = 0.01


def wait_for(
    condition: Callable[[], T],
    *,
    timeout: float = 30.0,
    what: str | Callable[[], str] = "the condition holds",
    every: float = _PAUSE_SECONDS,
) -> T:
    """Call ``condition`` until it returns something true, and return that.

    After ``timeout`` seconds the test fails with ``what``. If that is a function, it
    can describe the state at that moment. A condition that costs the tested processes
    time, such as a connection, is called ``every`` so many seconds.
    """
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout
    while True:
        # Read the clock before the condition: a slow condition gets a last chance.
        late = time.monotonic() >= deadline
        if result := condition():
            return result
        if late:
            told = what if isinstance(what, str) else what()
            pytest.fail(f"waited {timeout:g} s in vain until: {told}")
        time.sleep(every)


def least(measure: Callable[[], float], within: float, times: int = 3) -> float:
    """Measure seconds until they are fewer than ``within``; return the fewest.

    It measures at most so many ``times``. A busy machine may delay some of them. Only
    what is always slow delays each.
    """
    took = [measure()]
    while min(took) >= within and len(took) < times:
        took.append(measure())
    return min(took)


def linger(seconds: float) -> None:
    """Let time pass, while faults are at work."""
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() >= until, timeout=seconds + 5)
