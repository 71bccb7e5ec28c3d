"""How far back a poll looks, while an old snapshot keeps the rows of ended jobs.

A poll begins at the start of each index, where it finds existing rows at once. Under an
old snapshot it first walks over all dead rows. So a slow poll is followed by short
ones, which begin where the last poll found nothing. A complete poll comes again within
a second, because the server may have stood still only once. As long as complete polls
stay slow, they become rarer, until they take a twentieth of the time.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from jobs_lib.backoff import rest
from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from jobs_lib.executor.claiming.cursor import Cursor

_QUICK = 0.002
"""Seconds of the server; after a complete poll below this, the next is complete too."""
_SHARE = 0.05
_MARGIN = 1.0
"""Seconds that a short poll allows between a retry's time and its commit."""
_MARK_SECONDS = 2.0
"""Seconds between an id and its commit; a complete poll finds slower ones."""


class PollDepth:
    """Which polls are complete, and where short ones begin; used by one thread."""

    def __init__(self) -> None:
        self.complete = True
        """Whether the last poll was complete."""
        self._complete_at = 0.0
        self._rest = 0.0
        """Seconds between the last complete poll and the next one."""
        self._due_from: dict[str, float] = {}
        """For each origin, the server's time before which nothing was scheduled."""
        self._fresh_from: dict[str, int] = {}
        """For each origin, the id up to which nothing was above its cursor."""
        self._levels_from: dict[str, int] = {}
        """The same for the cursors of the other priorities."""
        self._asked: dict[str, Cursor] = {}
        self._top = 0
        self._marks: tuple[float, int] = (0.0, 0)
        """The highest cursor of a moment, which becomes ``_top`` a while later."""

    def prepare(self, active: Mapping[str, Cursor]) -> dict[str, Any]:
        """The parameters of the query ``look``."""
        self._asked = dict(active)
        self.complete = time.monotonic() >= self._complete_at
        fresh = {} if self.complete else self._fresh_from
        if self.complete:
            self._due_from = {}
        levels = [] if self.complete else [(o, n) for o in active for n in (1, -1)]
        return {
            "origins": text_array(list(active)),
            "cursors": int_array(max(p.at, fresh.get(o, 0)) for o, p in active.items()),
            "due_from": self.choose_due(active),
            "complete": self.complete,
            "level_origins": text_array([o for o, _ in levels]),
            "levels": int_array(n for _, n in levels),
            "level_cursors": int_array(
                max(active[o].levels[n], self._levels_from.get(o, 0)) for o, n in levels
            ),
        }

    def choose_due(self, active: Mapping[str, Cursor]) -> str:
        """The server's time from which each origin may have due jobs."""
        times = (str(self._due_from.get(origin, -math.inf)) for origin in active)
        return "{" + ",".join(times) + "}"

    def note(
        self,
        fresh: Set[str],
        due: Mapping[str, float],
        prioritized: Set[str | None],
        clock: float,
        took: float,
    ) -> None:
        """Note the result of a poll.

        Args:
            fresh: origins with something above their cursors.
            due: the first scheduled job's seconds from now, by origin.
            prioritized: origins with jobs of other priorities; None is any.
            clock: the server's time.
            took: how many of the server's seconds the poll took.
        """
        now = time.monotonic()
        if self.complete:
            slow = took > _QUICK
            self._rest = rest(took, _SHARE, self._rest) if slow else 0.0
            self._complete_at = now + self._rest
        self._due_from = {
            origin: clock + min(due.get(origin, 0.0), 0.0) - _MARGIN
            for origin in self._asked
        }
        marked_at, mark = self._marks
        if now - marked_at > _MARK_SECONDS:
            self._top = max(self._top, mark)
            cursors = self._asked.values()
            tops = (max(p.at, *p.levels.values()) for p in cursors)
            self._marks = now, max(tops, default=0)
        self._fresh_from = self._raise(self._fresh_from, fresh)
        if None not in prioritized:
            self._levels_from = self._raise(self._levels_from, prioritized)

    def _raise(self, marks: Mapping[str, int], found: Set[Any]) -> dict[str, int]:
        """If nothing was found, the next short poll begins at the top."""
        return {
            origin: marks.get(origin, 0) if origin in found else self._top
            for origin in self._asked
        }
