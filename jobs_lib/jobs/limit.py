"""Limits of how many jobs of a type run at once: over all pods, and by own workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from jobs_lib.jobs.payload import Payload

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


def check_default(name: str, payload: Payload) -> None:
    """Refuse a default of a limit's parameter, other than None.

    Claims read the value from the stored payload, which has no field for a parameter
    that was left out. They count such a job under the empty value.

    Args:
        name: the limit's parameter.
        payload: the type's payload.

    Raises:
        ConfigurationError: it has such a default.
    """
    default = payload.defaults.get(name)
    if default is None or default == NAMELESS:
        return
    raise ConfigurationError(
        f"the limit of {payload.type_name!r} is by its parameter {name!r}, whose "
        f"default is {default!r}: a job that leaves it out would not count as one of "
        "that value. Take the default away, or make it None and let the handler choose"
    )
