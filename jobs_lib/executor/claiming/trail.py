"""Which transactions were open at which time, and where the cursors were then."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Cursors = dict[str, int]
"""The cursors of some origins at one moment."""
_STEP = 0.5
_MARGIN = 2.0
"""Seconds that a transaction may be open before a snapshot shows it: it draws an id
first, and a snapshot names it only once a later one, such as a heartbeat's, has
ended."""


class Trail:
    """Says how far back rows may have appeared since the last look at the server.

    All ids that a transaction draws lie above the cursors of a moment before it began.
    So once it has ended, sweeps look for its rows only above those, no matter how long
    other transactions stay open. Used by one thread.
    """

    def __init__(self) -> None:
        self._past: deque[tuple[float, Cursors]] = deque()
        self._open: dict[int, Cursors] = {}
        """For each open transaction, cursors from before it."""
        self._seen_at: float | None = None
        self._following = 0

    def note(
        self, now: float, cursors: Cursors, following: int, running: Iterable[int]
    ) -> list[Cursors]:
        """Note a snapshot; return cursors from before transactions that ended since.

        The first are cursors from before transactions that no snapshot has shown.

        Args:
            now: when the snapshot was asked for.
            cursors: at that time.
            following: the first transaction id that the snapshot does not know.
            running: the transactions that were open.
        """
        # Of a time before the last snapshot: newer transactions began later.
        before: Cursors = {}
        if self._seen_at is not None:
            while len(self._past) > 1 and self._past[1][0] <= self._seen_at - _MARGIN:
                self._past.popleft()
            if self._past[0][0] <= self._seen_at - _MARGIN:
                before = self._past[0][1]
        still = set(running)
        # Each moment once: hundreds of transactions that end together share a few.
        ended = {id(c): c for xid, c in self._open.items() if xid not in still}
        quiet = not ended and self._following == following and not self._is_new(still)
        self._open = {xid: self._open.get(xid, before) for xid in still}
        if not self._past or now - self._past[-1][0] >= _STEP:
            self._past.append((now, cursors))
        first = self._seen_at is None
        self._seen_at, self._following = now, following
        return [] if quiet and not first else [before, *ended.values()]

    def _is_new(self, running: set[int]) -> bool:
        return not running <= self._open.keys()
