"""Find rows that were committed late: they lie behind a cursor, not in flight."""

from __future__ import annotations

import math
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from jobs_lib.executor.claiming.trail import Trail
from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jobs_lib.executor.claiming.cursor import Cursor, Descent
    from jobs_lib.executor.claiming.group_starts import GroupStarts
    from jobs_lib.executor.claiming.in_flight import InFlight

SLICE = 1_000
"""Rows of each origin that one sweep looks at."""
_SPAN = 100_000
"""Ids that it walks over: dead rows of ended jobs do not count as rows."""
_SMALLEST = 64
"""How many times smaller slices become if they take long."""
_SHARE = 0.05
_PAUSE = 0.05
_LONGEST_PAUSE = 0.5
"""The pause even if a sweep took long: a server that stood still once did not do so
because of the sweep. Slices shrink until this pause is twenty times a sweep's time."""
_FULL_PAUSE = 60.0
_SHARED_PAUSE = 1.0
"""The same if other apps share the tables: where their job of a group has ended, the
group goes on behind the cursor, and nobody tells of it."""
_MARK_PAUSE = 0.5
_MOST_MARKS = 120
NEAR, FAR, RIPE = range(3)
"""The place where a sweep looks: see :class:`LateCommits`."""


class LateCommits:
    """When to sweep, and from where; used by one thread.

    Sweeps take at most a twentieth of the time, and go down from the newest ids, among
    which most late rows are. They alternate between three places:

    - near the cursors: transactions of the last seconds have added rows there;
    - further down: to where a longer transaction, which has ended, began;
    - at older ids, a last time: no transaction can add rows there any more.

    Each takes as many sweeps as it needs. Sweeps do not return to ids that they have
    left, except that now and then they look at all: somebody may have changed rows by
    hand, or another app has ended the job of a group.
    """

    def __init__(self) -> None:
        now = time.monotonic()
        self._next_at = 0.0
        self._full_at = self._started_at = now
        """When sweeps last began to look at all."""
        self._kind = RIPE
        """Where this sweep looks."""
        self._shrunk = 1
        """How many times smaller the slices are than the maximum."""
        self._slices: dict[str, tuple[int, int]] = {}
        """The slice of each origin that is being swept: behind the first id, up to the
        second."""
        self._cursor_ids: dict[str, int] = {}
        self._marks: deque[tuple[float, int, dict[str, int]]] = deque()
        # (taken at, first transaction id not yet given out, cursors then)
        self._trail = Trail()

    def is_due(self) -> bool:
        """Whether it is time for another sweep."""
        return time.monotonic() >= self._next_at

    def due_at(self, cursors: Mapping[str, Cursor]) -> float:
        """When the next one should follow by itself; infinite if nothing is left."""
        left = any(
            p.near.goes_on or p.far.goes_on or p.is_ripe for p in cursors.values()
        )
        return self._next_at if left else math.inf

    def prepare(
        self,
        cursors: Mapping[str, Cursor],
        types: list[str],
        in_flight: InFlight,
        *,
        shared: bool = False,
    ) -> dict[str, Any] | None:
        """The parameters of the query ``sweep``; None where nothing can be late.

        Args:
            cursors: of the origins that may be claimed from.
            types: the types that may run.
            in_flight: the jobs that were claimed.
            shared: whether other apps run jobs of the same tables.
        """
        self._started_at = time.monotonic()
        pause = _SHARED_PAUSE if shared else _FULL_PAUSE
        if self._started_at > self._full_at + pause:
            self._full_at = self._started_at
            for cursor in cursors.values():
                if shared:
                    # Above the marks, too: a long transaction holds up no group.
                    cursor.far.want(0)
                else:
                    cursor.sweep_all_again()
        ends = self._choose_ends(cursors)
        # A claim in the same round trip comes after the horizon and moves the cursors:
        # jobs enqueued in between are younger than the horizon.
        self._cursor_ids = {origin: p.at for origin, p in cursors.items()}
        if not ends:
            self._slices = {}
            self._next_at = self._started_at + _PAUSE
            return None
        span = max(1, _SPAN // self._shrunk)
        self._slices = {
            origin: (self._find_look(cursors[origin]).choose_start(span), end)
            for origin, end in ends.items()
        }
        busy = [key for key in in_flight.lanes if key[0] in ends]
        return {
            "busy_origins": text_array([origin for origin, _ in busy]),
            "busy_groups": text_array([group for _, group in busy]),
            "origins": text_array(list(ends)),
            "starts": int_array(start for start, _ in self._slices.values()),
            "ends": int_array(ends.values()),
            "highs": int_array(cursors[origin].levels[1] for origin in ends),
            "batches": int_array(cursors[origin].levels[-1] for origin in ends),
            "types": types,
            "flying": int_array(in_flight.jobs),
            "limit": self._limit,
        }

    @property
    def _limit(self) -> int:
        return max(min(SLICE, 2), SLICE // self._shrunk)

    def read(
        self,
        rows: Iterable[tuple[str | None, int, str | None, int | None]],
        cursors: Mapping[str, Cursor],
        in_flight: InFlight,
        group_starts: GroupStarts,
    ) -> dict[int, str]:
        """The late jobs, by id, with their origins."""
        late: dict[int, str] = {}
        seen: dict[str, tuple[int, int]] = {}
        took = 0.0
        for origin, job_id, group, count in rows:
            if origin is None:
                took = job_id / 1e6
                continue
            if count is not None:
                seen[origin] = count, job_id
                continue
            if job_id in in_flight.jobs:
                continue
            lane = None
            if group is not None:
                group_starts.lower((origin, group), job_id)
                lane = in_flight.lanes.get((origin, group))
            if lane is None:
                late[job_id] = origin
            else:
                lane.note_passed(job_id)
        limit = self._limit
        for origin, (start, end) in self._slices.items():
            if cursor := cursors.get(origin):
                count, last = seen.get(origin, (0, 0))
                reached = last - 1 if count >= limit else start
                self._find_look(cursor).reach(end, reached)
        self._rest(took)
        return late

    def _rest(self, took: float) -> None:
        """Wait in proportion to the server's time that a sweep took."""
        pause = took / _SHARE
        if pause > _LONGEST_PAUSE:
            self._shrunk = min(_SMALLEST, self._shrunk * 2)
        elif pause < _LONGEST_PAUSE / 4:
            self._shrunk = max(1, self._shrunk // 2)
        pause = min(max(pause, _PAUSE), _LONGEST_PAUSE)
        self._next_at = time.monotonic() + pause

    def _choose_ends(self, cursors: Mapping[str, Cursor]) -> dict[str, int]:
        """The origins to sweep this time, and the id from which each is swept down."""
        for turn in range(1, 4):
            self._kind = (self._kind + turn) % 3
            if ends := self._find_ends(cursors):
                break
            self._kind = (self._kind - turn) % 3
        return ends

    def _find_ends(self, cursors: Mapping[str, Cursor]) -> dict[str, int]:
        if self._kind == RIPE:
            return {o: p.begin_pass() for o, p in cursors.items() if p.is_ripe}
        return {
            origin: descent.begin(cursor.at)
            for origin, cursor in cursors.items()
            if (descent := self._find_descent(cursor)).goes_on
        }

    def _find_descent(self, cursor: Cursor) -> Descent:
        return cursor.near if self._kind == NEAR else cursor.far

    def _find_look(self, cursor: Cursor) -> Descent | Cursor:
        """The descent through the origin that this sweep continues."""
        return cursor if self._kind == RIPE else self._find_descent(cursor)

    def _look_back(
        self, following: int, running: Iterable[int], cursors: Mapping[str, Cursor]
    ) -> None:
        """Look for rows of transactions that have ended since the last horizon."""
        now = self._started_at
        ended = self._trail.note(now, self._cursor_ids, following, running)
        for before in ended:
            for origin, cursor in cursors.items():
                low = before.get(origin, 0)
                # Rows near the cursor must not wait until a long descent has ended.
                nearest = max(low, cursor.at - _SPAN)
                if nearest < cursor.at:
                    cursor.near.want(nearest)
                if low < nearest:
                    cursor.far.want(low)

    def note_horizon(
        self,
        oldest: int,
        following: int,
        running: Iterable[int],
        cursors: Mapping[str, Cursor],
    ) -> None:
        """Note the cursors of a moment whose transactions have all ended.

        Args:
            oldest: the oldest transaction that is still open.
            following: the first transaction id that is not given out yet.
            running: the transactions that are open.
            cursors: of all origins.
        """
        self._look_back(following, running, cursors)
        now = self._started_at
        while self._marks and self._marks[0][1] <= oldest:
            taken_at, _, marks = self._marks[0]
            if now - taken_at < 2 * _MARK_PAUSE:
                break
            self._marks.popleft()
            for origin, mark in marks.items():
                if cursor := cursors.get(origin):
                    cursor.close(mark)
        if not self._marks or now - self._marks[-1][0] > _MARK_PAUSE:
            self._marks.append((now, following, self._cursor_ids))
            self._thin_out()

    def _thin_out(self) -> None:
        """Forget every second mark if a long transaction lets none go.

        The first and the last one stay. Without a mark, ids count as closed later.
        """
        if len(self._marks) > _MOST_MARKS:
            self._marks = deque(islice(self._marks, 0, None, 2))
