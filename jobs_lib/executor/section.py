"""Sections: job types that an executor claims together, separately from others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs_lib.jobs.limit import Limit, Workers
    from jobs_lib.jobs.type import JobType
    from jobs_lib.kafka.dependencies import Dependency


@dataclass(frozen=True, slots=True)
class Section:
    """Some job types of an app; claims of them have their own cursors.

    So if a section's workers are busy, or its limit is used up, it waits, and no other
    section waits with it.
    """

    types: frozenset[str]
    """The types' names and aliases."""
    others: frozenset[str] = frozenset()
    """The names of all other sections' types."""
    workers: Workers | None = None
    """The workers that run them; None for the workers that types share by default."""
    limit: Limit | None = None
    """The limit of its one type."""
    type_name: str = ""
    """With a limit: the type's name, whatever alias its jobs have."""

    after: tuple[Dependency, ...] = ()
    """The groups that must have handled the record of a job before it starts."""

    @property
    def parameter(self) -> str | None:
        """The parameter whose values are limited one by one."""
        return self.limit.parameter if self.limit else None


def divide(types: Mapping[str, JobType[Any]]) -> list[Section]:
    """The sections of an app; the first is for types without workers, limits or gates
    of their own.

    A type with a limit is a section of its own. Types with the same workers are one, if
    they wait for the same groups.
    """
    shares: dict[object, set[str]] = {None: set()}
    for name, job_type in types.items():
        key: object = job_type.name if job_type.limit else job_type.workers
        if job_type.after:
            key = key, frozenset(job_type.after)
        shares.setdefault(key, set()).add(name)
    if not shares[None] and len(shares) > 1:
        del shares[None]
    every = frozenset(types)
    sections = []
    for names in shares.values():
        first = types[min(names)] if names else None
        own = frozenset(names)
        sections.append(
            Section(
                own,
                every - own,
                first.workers if first else None,
                first.limit if first else None,
                first.name if first else "",
                first.after if first else (),
            )
        )
    return sections
