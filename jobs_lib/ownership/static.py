"""Origins that the settings name: a fixed list, or all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib.ownership.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import psycopg


class StaticSource(Source):
    """Wants the same origins as long as it runs; takes each once from any owner."""

    def __init__(
        self,
        origins: Iterable[str],
        find: Callable[[psycopg.Connection[Any]], Iterable[str]] = lambda _: (),
    ) -> None:
        """Prepare to want origins.

        Args:
            origins: those that are known now.
            find: finds those that come later: the home topic may change, or the number
                of its partitions.
        """
        super().__init__()
        self._origins = frozenset(origins)
        self._find = find

    def start(self, changed: Callable[[], None]) -> None:
        """Want the origins from now on."""
        super().start(changed)
        self.assign(self._origins)

    def look(self, connection: psycopg.Connection[Any]) -> None:
        """Want the origins that have come since."""
        if new := frozenset(self._find(connection)) - self._origins:
            self._origins |= new
            self.assign(new)
