"""A fixed list of origins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.ownership.source import Assignment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class StaticSource:
    """Always the same origins, taken over from whoever has them, once, at start."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origins)
        self._assignment = Assignment()

    def start(self, changed: Callable[[], None]) -> None:
        """Want them from now on."""
        self._assignment.assign(self._origins)
        changed()

    def stop(self) -> None:
        """Want nothing more."""
        self._assignment.replace(())

    @property
    def wanted(self) -> frozenset[str]:
        """The list, while started."""
        return self._assignment.wanted

    def claims(self, origins: Iterable[str]) -> frozenset[str]:
        """All of them, until they were taken once."""
        return self._assignment.claims(origins)

    def took(self, origins: Iterable[str]) -> None:
        """These were taken over."""
        self._assignment.took(origins)
