"""Limits of how many jobs of a type run at once: over all pods, and by own workers."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 1_000
"""The largest limit: each job that it lets run has a row of its own."""
MOST_WORKERS = 1_000
NAMELESS = ""
"""The value of all jobs if a limit has no parameter."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Lets at most ``most`` jobs of a type run at once, over all pods."""

    most: int
    """The number of jobs."""
    parameter: str | None = None
    """A parameter of the payload: each of its values has its own limit."""

    def __str__(self) -> str:
        """Describe the limit for people."""
        each = f" for each {self.parameter}" if self.parameter else ""
        return f"{self.most:,} at once{each}"


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers of their own for some job types, in each process.

    These types take no worker from other types, however slow they are, and keep their
    own workers, however busy the others are. Types with equal ``Workers`` share them.
    """

    count: int
    """How many jobs of these types run at once in a process. Plain and async handlers
    count separately, as for all other types."""
    name: str
    """Their name in the setting ``own_workers`` and in reports."""
