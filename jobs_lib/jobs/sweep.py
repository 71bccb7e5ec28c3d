"""Find rows that were committed late: behind a cursor, and not in flight."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from jobs_lib.db import int_array, text_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jobs_lib.jobs.flight import Flight
    from jobs_lib.jobs.floors import Floors
    from jobs_lib.jobs.position import Position

SLICE = 1_000
"""Rows of each origin that one sweep looks at."""
_SHARE = 0.05
_PAUSE = 0.05
_FULL_PAUSE = 60.0
_MARK_PAUSE = 0.5


class Sweeper:
    """When to sweep, and from where; used by one thread.

    Takes at most a twentieth of the time. What is swept lies above a low mark, below
    which no row can still appear. Now and then a sweep starts at 0: a transaction may
    have drawn an id before it had a transaction id.
    """

    def __init__(self) -> None:
        now = time.monotonic()
        self._next_at = 0.0
        self._next_full_at = now + _FULL_PAUSE
        self._started_at = now
        self._swept: set[str] = set()
        self._cursors: dict[str, int] = {}
        self._marks: deque[tuple[float, int, dict[str, int]]] = deque()
        # (taken at, first transaction id not yet given out, cursors then)

    def is_due(self) -> bool:
        """Whether it is time for another sweep."""
        return time.monotonic() >= self._next_at

    def prepare(
        self, positions: Mapping[str, Position], types: list[str], flight: Flight
    ) -> dict[str, Any] | None:
        """The parameters of the query ``sweep``; None where nothing can be late."""
        self._started_at = time.monotonic()
        if self._started_at > self._next_full_at:
            self._next_full_at = self._started_at + _FULL_PAUSE
            for position in positions.values():
                position.low = position.swept = 0
        swept = {o: p for o, p in positions.items() if p.low < p.cursor}
        self._swept = set(swept)
        # A claim in the same round trip comes after the horizon and moves the cursors:
        # what was enqueued in between is younger than the horizon.
        self._cursors = {origin: p.cursor for origin, p in positions.items()}
        if not swept:
            self._next_at = self._started_at + _PAUSE
            return None
        return {
            "origins": text_array(list(swept)),
            "starts": int_array(max(p.low, p.swept) for p in swept.values()),
            "cursors": int_array(p.cursor for p in swept.values()),
            "highs": int_array(p.levels[1] for p in swept.values()),
            "batches": int_array(p.levels[-1] for p in swept.values()),
            "types": types,
            "flying": int_array(flight.jobs),
            "limit": SLICE,
        }

    def read(
        self,
        rows: Iterable[tuple[str, int, str | None, bool]],
        positions: Mapping[str, Position],
        flight: Flight,
        floors: Floors,
    ) -> dict[int, str]:
        """The late ones, by id, with their origins."""
        late: dict[int, str] = {}
        seen: dict[str, tuple[int, int]] = {}
        for origin, job_id, group, idle in rows:
            count, last = seen.get(origin, (0, 0))
            seen[origin] = (count + 1, max(last, job_id))
            if not idle or job_id in flight.jobs:
                continue
            lane = None
            if group is not None:
                floors.lower((origin, group), job_id)
                lane = flight.lanes.get((origin, group))
            if lane is None:
                late[job_id] = origin
            else:
                lane.more = True
        for origin, position in positions.items():
            if origin not in self._swept:
                continue
            count, last = seen.get(origin, (0, 0))
            # A full slice goes on behind itself; else it starts again at the mark.
            position.swept = last if count >= SLICE else 0
        took = time.monotonic() - self._started_at
        self._next_at = self._started_at + max(_PAUSE, took / _SHARE)
        return late

    def raise_lows(
        self, oldest: int, following: int, positions: Mapping[str, Position]
    ) -> None:
        """Raise the low marks to the cursors of a moment whose transactions all ended.

        Args:
            oldest: the oldest transaction that is still open.
            following: the first transaction id that is not given out yet.
            positions: of all origins.
        """
        now = self._started_at
        while self._marks and self._marks[0][1] <= oldest:
            taken_at, _, cursors = self._marks[0]
            if now - taken_at < 2 * _MARK_PAUSE:
                break
            self._marks.popleft()
            for origin, cursor in cursors.items():
                if position := positions.get(origin):
                    position.low = max(position.low, min(cursor, position.cursor))
        if not self._marks or now - self._marks[-1][0] > _MARK_PAUSE:
            self._marks.append((now, following, self._cursors))
