"""Where ownership comes from: one interface for every source."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Source(Protocol):
    """Says which origins this process should own now.

    A source only says; :class:`jobs_lib.ownership.Ownership` takes and gives.
    """

    def start(self, changed: Callable[[], None]) -> None:
        """Start to watch; ``changed`` is called after each change, from any thread."""

    def stop(self) -> None:
        """Stop watching."""

    @property
    def wanted(self) -> frozenset[str]:
        """The origins that this process should own."""

    def claims(self, origins: Iterable[str]) -> frozenset[str]:
        """Those of ``origins`` that may be taken from a living owner.

        They are what an authority, such as the group's coordinator, has just given. The
        right is used up by :meth:`took`: what is lost afterwards is not fought for.
        """

    def took(self, origins: Iterable[str]) -> None:
        """These were taken over."""


class Assignment:
    """The set that a source wants, and what of it is newly given; thread-safe.

    Set arithmetic, so that odd callbacks do no harm: a revocation of what was never
    assigned, an assignment of what is there already, a lost one twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: frozenset[str] = frozenset()
        self._given: set[str] = set()

    @property
    def wanted(self) -> frozenset[str]:
        """What is assigned now."""
        with self._lock:
            return self._wanted

    def assign(self, origins: Iterable[str]) -> None:
        """Add origins that an authority gave to this process."""
        with self._lock:
            new = frozenset(origins)
            self._wanted |= new
            self._given |= new

    def revoke(self, origins: Iterable[str]) -> None:
        """Remove origins."""
        with self._lock:
            gone = frozenset(origins)
            self._wanted -= gone
            self._given -= gone

    def replace(self, origins: Iterable[str]) -> bool:
        """Set what is wanted, without authority over living owners; True if changed."""
        with self._lock:
            before, self._wanted = self._wanted, frozenset(origins)
            self._given &= self._wanted
            return before != self._wanted

    def claims(self, origins: Iterable[str]) -> frozenset[str]:
        """Those newly given."""
        with self._lock:
            return frozenset(origins) & self._given

    def took(self, origins: Iterable[str]) -> None:
        """These are not new any more."""
        with self._lock:
            self._given -= frozenset(origins)
