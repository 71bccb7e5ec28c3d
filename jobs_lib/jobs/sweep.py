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
_SPAN = 100_000
"""Ids that it walks over: of what has ended rows may still be there, and not count."""
_SHARE = 0.05
_PAUSE = 0.05
_FULL_PAUSE = 60.0
_MARK_PAUSE = 0.5


class Sweeper:
    """When to sweep, and from where; used by one thread.

    Takes at most a twentieth of the time, and goes down from the newest, of which most
    are late. In turns it looks at what lies right behind the cursors, where rows can
    still appear, and once more at what is ripe: where none can any more. Of that a pass
    takes as many sweeps as it needs, and what it has left behind is not looked at
    again, except now and then: a transaction may have drawn an id before it had a
    transaction id.
    """

    def __init__(self) -> None:
        now = time.monotonic()
        self._next_at = 0.0
        self._next_full_at = now + _FULL_PAUSE
        self._started_at = now
        self._passing = False
        """Whether this sweep is one of what is ripe."""
        self._starts: dict[str, int] = {}
        """Down to where each origin is being swept."""
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
                # A pass that takes so long goes on, or it would never end.
                if not position.left:
                    position.low = 0
        ends = self._choose_ends(positions)
        self._starts = {
            origin: self._choose_start(positions[origin], end)
            for origin, end in ends.items()
        }
        # A claim in the same round trip comes after the horizon and moves the cursors:
        # what was enqueued in between is younger than the horizon.
        self._cursors = {origin: p.cursor for origin, p in positions.items()}
        if not ends:
            self._next_at = self._started_at + _PAUSE
            return None
        busy = [key for key in flight.lanes if key[0] in ends]
        return {
            "busy_origins": text_array([origin for origin, _ in busy]),
            "busy_groups": text_array([group for _, group in busy]),
            "origins": text_array(list(ends)),
            "starts": int_array(self._starts.values()),
            "ends": int_array(ends.values()),
            "highs": int_array(positions[origin].levels[1] for origin in ends),
            "batches": int_array(positions[origin].levels[-1] for origin in ends),
            "types": types,
            "flying": int_array(flight.jobs),
            "limit": SLICE,
        }

    def read(
        self,
        rows: Iterable[tuple[str, int, str | None, int | None]],
        positions: Mapping[str, Position],
        flight: Flight,
        floors: Floors,
    ) -> dict[int, str]:
        """The late ones, by id, with their origins."""
        late: dict[int, str] = {}
        seen: dict[str, tuple[int, int]] = {}
        for origin, job_id, group, count in rows:
            if count is not None:
                seen[origin] = count, job_id
                continue
            if job_id in flight.jobs:
                continue
            lane = None
            if group is not None:
                floors.lower((origin, group), job_id)
                lane = flight.lanes.get((origin, group))
            if lane is None:
                late[job_id] = origin
            else:
                lane.more = True
        for origin, start in self._starts.items():
            if self._passing and (position := positions.get(origin)):
                count, last = seen.get(origin, (0, 0))
                reached = last - 1 if count >= SLICE else start
                position.left = reached if reached > position.low else 0
                if not position.left:
                    position.low = position.target
        took = time.monotonic() - self._started_at
        self._next_at = self._started_at + max(_PAUSE, took / _SHARE)
        return late

    def _choose_ends(self, positions: Mapping[str, Position]) -> dict[str, int]:
        """The origins to sweep this time, and from where each is swept down."""
        fresh = {o: p.cursor for o, p in positions.items() if p.ripe < p.cursor}
        ripe = {o: p for o, p in positions.items() if p.low < p.ripe}
        self._passing = bool(ripe) and not (self._passing and fresh)
        if not self._passing:
            return fresh
        for position in ripe.values():
            if not position.left:
                position.left = position.target = position.ripe
        return {origin: position.left for origin, position in ripe.items()}

    def _choose_start(self, position: Position, end: int) -> int:
        if not self._passing:
            # What lies further down is found when it is ripe.
            return max(position.ripe, end - _SPAN)
        # Each slice as long as all before it: there are large gaps between old ids.
        return max(position.low, end - max(_SPAN, position.target - end))

    def ripen(
        self, oldest: int, following: int, positions: Mapping[str, Position]
    ) -> None:
        """Note the cursors of a moment whose transactions have all ended.

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
                    position.ripe = max(position.ripe, min(cursor, position.cursor))
        if not self._marks or now - self._marks[-1][0] > _MARK_PAUSE:
            self._marks.append((now, following, self._cursors))
