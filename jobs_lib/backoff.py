"""How long to wait before the next attempt: pure functions of attempt and error."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


def is_number(value: object) -> bool:
    """Whether the value is a number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Retry:
    """When a failed job runs again.

    The delay after attempt n is drawn evenly between zero and
    ``min(cap, first * factor ** (n - 1))`` seconds: full jitter, which spreads the
    retries of one outage best. See Marc Brooker, "Exponential Backoff And Jitter",
    AWS Architecture Blog, 2015.
    """

    first: float = 1.0
    """Seconds, the bound of the first delay."""
    factor: float = 2.0
    """Growth of the bound from one attempt to the next."""
    cap: float = 3_600.0
    """Seconds, the largest bound."""
    max_attempts: int | None = None
    """Attempts after which the job is discarded. Defaults to None: never."""

    def __post_init__(self) -> None:
        numbers = (self.first, self.factor, self.cap)
        if not (
            all(map(is_number, numbers))
            and 0 < self.first <= self.cap < math.inf
            and self.factor >= 1
        ):
            raise ValueError(
                "a retry policy needs numbers with 0 < first <= cap < infinity and "
                f"factor >= 1, not {self}"
            )
        most = self.max_attempts
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"max_attempts must be a number from 1 on, not {most!r}")

    def bound(self, attempt: int) -> float:
        """Seconds, the longest delay after the failed attempt (1 is the first)."""
        if self.factor == 1:
            return self.first
        # Not by the power alone: factor ** 10_000 is no float.
        if attempt - 1 >= math.log(self.cap / self.first, self.factor):
            return self.cap
        return min(self.first * self.factor ** (attempt - 1), self.cap)

    def delay(self, attempt: int) -> float:
        """Seconds to wait after the failed attempt (1 is the first)."""
        return self.bound(attempt) * random.random()

    def exhausted(self, attempt: int) -> bool:
        """Whether this failed attempt was the last one."""
        return self.max_attempts is not None and attempt >= self.max_attempts


def exponential(
    *,
    first: float = 1.0,
    factor: float = 2.0,
    cap: float = 3_600.0,
    max_attempts: int | None = None,
) -> Retry:
    """A policy whose delays grow by ``factor`` from ``first`` to ``cap`` seconds."""
    return Retry(first, factor, cap, max_attempts)


_FIRST_REST = 1.0
"""Seconds: a job that only such a poll finds still starts within two seconds."""


def rest(took: float, share: float, last: float) -> float:
    """Seconds to rest after a slow poll, so that polls take only a share of the time.

    A server that stood still once says nothing about the next poll. So the first rest
    is short, and each one is at most twice as long as the one before it.

    Args:
        took: seconds of the poll.
        share: the share of the time that polls may take in the long run.
        last: seconds of the previous rest; 0 if the previous poll was quick.
    """
    return min(took / share, max(_FIRST_REST, 2 * last))


RECONNECT = Retry(first=0.1, cap=5.0)
"""How every loop of this library waits after an error of a server."""
