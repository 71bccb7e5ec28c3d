"""A fixed list of origins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.ownership.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class StaticSource(Source):
    """Always wants the same origins; takes them once, at start, from any owner."""

    def __init__(self, origins: Iterable[str]) -> None:
        super().__init__()
        self._origins = frozenset(origins)

    def start(self, changed: Callable[[], None]) -> None:
        """Want the origins from now on."""
        super().start(changed)
        self.assign(self._origins)
