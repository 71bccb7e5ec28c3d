"""Sources of ownership: they say which origins a process should own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any
from zlib import crc32

from jobs_lib.errors import ConfigurationError, FencedError
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import psycopg

    from jobs_lib.errors import JobsError


class Source:
    """Says which origins this process should own now, and which are newly assigned.

    A source only says; :class:`jobs_lib.ownership.Ownership` takes and releases. It is
    set arithmetic, so odd callbacks do no harm: revoking what was never assigned,
    assigning what is there already, losing the same twice. Safe for many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: frozenset[str] = frozenset()
        self._given: frozenset[str] = frozenset()
        self._changed: Callable[[], None] = lambda: None
        self._share = 0, 1

    def share(self, index: int, count: int) -> None:
        """Want only share ``index`` of ``count``: other processes want the others."""
        self._share = index % count, count

    def _is_ours(self, origin: str) -> bool:
        index, count = self._share
        return count == 1 or crc32(origin.encode()) % count == index

    def start(self, changed: Callable[[], None]) -> None:
        """Start to watch; ``changed`` is called after each change, from any thread."""
        self._changed = changed
        changed()

    def stop(self) -> None:
        """Stop watching, and want nothing more."""
        self.replace(())

    @property
    def wanted(self) -> frozenset[str]:
        """The origins that this process should own."""
        with self._lock:
            return frozenset(filter(self._is_ours, self._wanted))

    def claims(self, origins: Iterable[str]) -> frozenset[str]:
        """The origins among these that may be taken from a living owner.

        An authority, such as the group's coordinator, has just assigned them. The right
        ends with :meth:`took`: an origin that is lost later is not fought for.
        """
        with self._lock:
            return frozenset(origins) & self._given

    def took(self, origins: Iterable[str]) -> None:
        """Note that these were taken over."""
        with self._lock:
            self._given -= frozenset(origins)

    def look(self, connection: psycopg.Connection[Any]) -> None:
        """Look into the database before a round of the ownership, which calls this."""

    def note_owned(self, owned: frozenset[str]) -> None:
        """Note what is owned after a round of the ownership, which calls this.

        What is neither wanted nor owned is handed over: others may have it.
        """

    def assign(self, origins: Iterable[str]) -> None:
        """Also want origins that an authority assigned to this process."""
        with self._lock:
            given = frozenset(origins)
            self._wanted |= given
            self._given |= given
        self._changed()

    def want(self, origins: Iterable[str]) -> None:
        """Also want origins, without the right to take from living owners."""
        with self._lock:
            self._wanted |= frozenset(origins)
        self._changed()

    def revoke(self, origins: Iterable[str]) -> None:
        """Want these origins no longer."""
        with self._lock:
            gone = frozenset(origins)
            self._wanted -= gone
            self._given -= gone
        self._changed()

    def replace(self, origins: Iterable[str]) -> None:
        """Want exactly these origins, without the right to take from living owners."""
        with self._lock:
            before, self._wanted = self._wanted, frozenset(origins)
            self._given &= self._wanted
        if before != self._wanted:
            self._changed()


class CombinedSource(Source):
    """Wants every origin that one of several sources wants."""

    def __init__(self, *sources: Source) -> None:
        super().__init__()
        self._sources = sources

    def start(self, changed: Callable[[], None]) -> None:
        """Start all sources."""
        for source in self._sources:
            source.start(changed)

    def stop(self) -> None:
        """Stop all sources."""
        for source in self._sources:
            source.stop()

    @property
    def wanted(self) -> frozenset[str]:
        """The origins that any source wants."""
        return frozenset().union(*(source.wanted for source in self._sources))

    def claims(self, origins: Iterable[str]) -> frozenset[str]:
        """The origins that any source may take from a living owner."""
        asked = frozenset(origins)
        return frozenset().union(*(source.claims(asked) for source in self._sources))

    def took(self, origins: Iterable[str]) -> None:
        """Note that these were taken over."""
        taken = frozenset(origins)
        for source in self._sources:
            source.took(taken)

    def look(self, connection: psycopg.Connection[Any]) -> None:
        """Let all sources look."""
        for source in self._sources:
            source.look(connection)

    def note_owned(self, owned: frozenset[str]) -> None:
        """Tell it all sources."""
        for source in self._sources:
            source.note_owned(owned)


class WatchingSource(Source, ABC):
    """A source with a thread that asks a server, and goes on after errors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.refused: Callable[[JobsError], None] = lambda error: None
        """Called when the source cannot go on until a person changes something."""
        self._name = name
        self._loop = Loop(name, self._watch, failed=self._note_failure)

    def start(self, changed: Callable[[], None]) -> None:
        """Start the thread."""
        super().start(changed)
        self._loop.start()

    def stop(self) -> None:
        """Stop the thread, and want nothing more."""
        self._loop.stop()
        super().stop()

    @abstractmethod
    def _watch(self) -> Iterator[None]:
        """Ask until the loop is stopped; yield after each answer."""

    def _fail(self) -> None:
        """React to an answer that did not come; does nothing by default."""

    def _note_failure(self, error: BaseException) -> None:
        self._fail()
        if isinstance(error, (ConfigurationError, FencedError)):
            self.refused(error)
