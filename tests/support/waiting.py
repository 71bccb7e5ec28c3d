"""Wait for a condition with a deadline: the only place where a test sleeps."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# The pause is short enough not to be felt, and leaves the cores to the tested code.
_PAUSE_SECONDS = 0.01

_USUAL_LOAD = 3.0
"""Threads that want a processor, for each one, while these tests run alone."""
_MOST_BUSY = 4.0

_last_moment = math.inf
"""Of all waits, by ``time.monotonic()``: who is ended cannot say what is lacking."""


def end_waits_at(moment: float) -> None:
    """Let the waits of the test that runs end at this moment, however long they may."""
    global _last_moment
    _last_moment = moment


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
    time, such as a connection, is called ``every`` so many seconds. Where others keep
    the machine busy, it waits for up to four times as long, and ends before the test's
    own time limit.
    """
    __tracebackhide__ = True
    began = time.monotonic()
    while True:
        # Read the clock before the condition: a slow condition gets a last chance.
        waited = time.monotonic() - began
        if result := condition():
            return result
        over = waited >= timeout and waited >= timeout * read_busyness()
        if over or began + waited >= _last_moment:
            told = what if isinstance(what, str) else what()
            pytest.fail(f"waited {waited:.0f} s in vain until: {told}")
        time.sleep(every)


def read_busyness() -> float:
    """Read how many times as long as usual this machine takes now, at most four."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(1.0, min(load / _USUAL_LOAD, _MOST_BUSY))


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
