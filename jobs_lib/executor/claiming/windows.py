"""Windows: which rows behind the cursors a claim looks at, and how many.

A window is a range of one origin's ids from its cursor on. Its size is the room for
jobs; it is smaller while groups lead to more jobs than the window has rows. If no job
of a window can run, a jump looks for one that can, ever further.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from jobs_lib.executor.claiming.cursor import WIDEST, Cursor
from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from jobs_lib.executor.claiming.group_starts import GroupStarts
    from jobs_lib.executor.claiming.in_flight import Group, InFlight
    from jobs_lib.executor.claiming.rows import JumpRow

_BATCH_SHARE = 16
_NORMAL_SHARE = 4
_MOST_PER_ROW = 16.0
_FURTHER = 64


class Windows:
    """The cursors of the owned origins, and the windows to look at next."""

    def __init__(self) -> None:
        self.cursors: dict[str, Cursor] = {}
        self.prioritized = False
        """Whether there are jobs that are not of normal priority."""
        self._order: deque[str] = deque()
        self._asked: dict[tuple[str, int], int] = {}
        self._per_row = 1.0
        """How many jobs a row of a window leads to, because groups come in lanes."""

    def take(self, origins: Mapping[str, int]) -> None:
        """Look at origins from their start, at these epochs."""
        for origin, epoch in origins.items():
            self.cursors[origin] = Cursor(epoch)
        self._order = deque(self.cursors)

    def release(self, origins: Iterable[str]) -> None:
        """Forget origins."""
        for origin in origins:
            self.cursors.pop(origin, None)
        self._order = deque(self.cursors)

    def rewind(self) -> None:
        """Start again in all origins: rows passed over lie below the cursors."""
        for cursor in self.cursors.values():
            cursor.rewind()

    def doubt(self) -> None:
        """Forget everything: no claim comes before a poll has read the pauses."""
        self.rewind()
        for cursor in self.cursors.values():
            cursor.seen = False

    def hint(self, origin: str) -> None:
        """Note a hint of something new in this origin; "" is any origin."""
        if cursor := self.cursors.get(origin):
            cursor.may_have_more = True
        elif not origin:
            for cursor in self.cursors.values():
                cursor.may_have_more = True

    # Asking

    def choose(self, active: Mapping[str, Cursor], room: int) -> list[str]:
        """The origins that may have more behind their cursors, in turn."""
        deep = [
            o
            for o in self._in_turn(active)
            # Other priorities do not wait until this one is past stuck jobs.
            if self.prioritized or active[o].jump_factor == 1
        ][:room]
        self._order.rotate(-len(deep))
        return deep

    def _in_turn(self, active: Mapping[str, Cursor]) -> Iterator[str]:
        """The origins that may have more behind their cursors."""
        return (
            o
            for o in self._order
            if o in active and active[o].may_have_more and active[o].seen
        )

    def is_plain(self, origin: str) -> bool:
        """Whether an origin's last rows were plain, so that more may be."""
        cursor = self.cursors[origin]
        return cursor.all_plain and cursor.jump_factor == 1 and not self.prioritized

    def prepare_plain(self, origin: str, room: int) -> dict[str, Any]:
        """The parameters of the query ``claim_plain`` that say where it looks."""
        cursor, size = self.cursors[origin], max(2, room)
        cursor.may_have_more = False
        self._asked = {(origin, 0): size}
        return {
            "origin": origin,
            "epoch": cursor.epoch,
            "cursor": cursor.at,
            "size": size,
        }

    def prepare(self, deep: list[str], room: int) -> dict[str, Any]:
        """The parameters of the query ``claim`` that say where it looks.

        Args:
            deep: origins to look at.
            room: the number of jobs that there is room for.
        """
        share = math.ceil(room / max(1, len(deep)))
        size = max(2, math.ceil(share / self._per_row))
        # If more of high priority waits than a claim takes, that comes first.
        less = max(2, size // _NORMAL_SHARE)
        sizes = {
            o: less if self.cursors[o].urgent else size
            for o in deep
            if self.cursors[o].jump_factor == 1
        }
        self._asked = {(o, 0): size for o, size in sizes.items()}
        leveled: list[tuple[str, int, int]] = []
        for origin in deep:
            cursor = self.cursors[origin]
            cursor.may_have_more = cursor.jump_factor > 1
            cursor.urgent = False
            if self.prioritized:
                few = _take_turn(cursor, share)
                leveled += [(origin, 1, share)] + [(origin, -1, few)] * (few > 0)
                # If the lowest priority was left out, there may still be some of it.
                cursor.may_have_more |= not few
        self._asked |= {(o, level): size for o, level, size in leveled}
        return {
            "window_origins": text_array([*sizes]),
            "cursors": int_array(self.cursors[o].at for o in sizes),
            "sizes": int_array(sizes.values()),
            "level_origins": text_array([o for o, _, _ in leveled]),
            "levels": int_array(level for _, level, _ in leveled),
            "level_cursors": int_array(
                self.cursors[o].levels[level] for o, level, _ in leveled
            ),
            "level_sizes": int_array(size for _, _, size in leveled),
        }

    # Reading

    def note(
        self,
        origin: str,
        level: int,
        furthest: int | None,
        count: int,
        *,
        plain: bool,
        barren: bool,
    ) -> None:
        """Note how far a window went.

        Args:
            origin: whose window it was.
            level: of priority.
            furthest: the highest id in it; None if no row of it counts.
            count: of its rows.
            plain: whether all of them could be claimed by ``claim_plain``.
            barren: whether none of them could run.
        """
        cursor = self.cursors[origin]
        cursor.found = True
        full = count >= self._asked[origin, level]
        if level:
            cursor.levels[level] = max(cursor.levels[level], furthest or 0)
            if level > 0:
                cursor.urgent = full
        else:
            cursor.advance(furthest or 0)
            cursor.all_plain = plain
            # A row that is not plain stops a plain claim: another claim takes it.
            full = full or not furthest or not plain
            cursor.jump_factor = _FURTHER if full and barren else 1
        cursor.may_have_more |= full

    def note_lanes(self, lanes: int, cut: int) -> None:
        """Take fewer rows and longer lanes while groups have more jobs.

        Args:
            lanes: how many a claim has opened.
            cut: how many of them have more behind them.
        """
        if cut * 2 > lanes > 8:
            self._per_row = min(_MOST_PER_ROW, self._per_row * 2)
        elif not cut:
            self._per_row = max(1.0, self._per_row / 2)

    # Past jobs that cannot run

    def prepare_jump(
        self,
        active: Mapping[str, Cursor],
        room: int,
        busy: Iterable[Group],
        group_starts: GroupStarts,
    ) -> dict[str, Any] | None:
        """The parameters of the query ``jump``; None if no origin is stuck.

        Args:
            active: the origins that may be claimed from.
            room: the number of jobs that there is room for.
            busy: groups whose rows are passed over.
            group_starts: of the other groups.
        """
        stuck = (o for o in self._in_turn(active) if active[o].jump_factor > 1)
        origin = next(stuck, None)
        if origin is None:
            return None
        # One at a time, in turn: the wider the jump, the more it sees of each group.
        self._order.remove(origin)
        self._order.append(origin)
        cursor = self.cursors[origin]
        cursor.may_have_more = False
        passed = {group for at, group in busy if at == origin}
        known = group_starts.choose({origin}, {(origin, group) for group in passed})
        return {
            "origin": origin,
            "cursor": cursor.at,
            "limit": min(WIDEST, max(2, room) * cursor.jump_factor),
            "room": room,
            "groups": text_array(list(passed)),
            "floor_groups": text_array([group for _, group, _ in known]),
            "floor_ids": int_array(floor for _, _, floor in known),
        }

    def read_jump(
        self,
        asked: Mapping[str, Any],
        row: JumpRow,
        in_flight: InFlight,
    ) -> dict[int, str]:
        """Move the cursor behind a jump's jobs; return their ids and origin.

        Args:
            asked: the query's parameters.
            row: the query's answer.
            in_flight: where groups are in flight.
        """
        origin = asked["origin"]
        cursor = self.cursors.get(origin)
        found = row.ids
        if cursor is None:
            return {}
        # If there are more than room allows, windows are the better way to go on.
        full = len(found) >= asked["room"]
        passed = found[-1] if full else row.furthest or 0
        if self.prioritized and found:
            # By id they would run beside higher ones; windows respect shares.
            full, passed, found = True, found[0] - 1, []
        stuck = not full and row.seen >= asked["limit"]
        cursor.jump_factor = min(cursor.jump_factor * _FURTHER, WIDEST) if stuck else 1
        cursor.advance(passed)
        cursor.may_have_more |= stuck or full or self.prioritized
        # The lanes of groups in flight reach the rows that it passed over.
        in_flight.note_passed(origin, asked["cursor"] + 1)
        return dict.fromkeys(found, origin)


def _take_turn(cursor: Cursor, share: int) -> int:
    """How many of the lowest priority a claim looks at, beside ``share`` of the others.

    However high the load of the others is, one in sixteen is of the lowest; and where
    the last claim has found none of the others, the lowest has its turn at once.
    """
    few = share // _BATCH_SHARE
    if not few:
        cursor.left_out += 1
        again = cursor.left_out > 1 and not cursor.found
        few = int(again or cursor.left_out * share >= _BATCH_SHARE)
    if few:
        cursor.left_out = 0
    cursor.found = False
    return few
