"""How many jobs of a type run at once: over all pods, and in a process of their own."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 1_000
"""Jobs that a limit may let run at once: each has a row of its own."""
MOST_WORKERS = 1_000
NAMELESS = ""
"""The value of all jobs where a limit looks at no parameter."""


@dataclass(frozen=True, slots=True)
class Limit:
    """At most so many jobs of a type at once, over all pods."""

    most: int
    """Jobs."""
    parameter: str | None = None
    """Of the payload: so many for each of its values. None: so many in all."""

    def __str__(self) -> str:
        """What a person needs to know of it."""
        each = f" for each {self.parameter}" if self.parameter else ""
        return f"{self.most:,} at once{each}"


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers of their own for some job types, in each process.

    However slow these types are, they take no worker from the others; and however busy
    the others are, these have theirs. Types that are given equal ``Workers`` share
    them.
    """

    count: int
    """How many jobs of these types run at once in a process. Plain handlers and async
    ones count apart, as for all others."""
    name: str
    """What the setting ``own_workers`` and the reports call them."""
