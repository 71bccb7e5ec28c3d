"""Windows: which rows behind the cursors a claim looks at, and how many.

A window is a range of one origin's ids from its cursor on. They are as large as there
is room for jobs, smaller while groups lead to more jobs than the window has rows, and
larger while windows hold nothing that can run.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from jobs_lib.db import int_array, text_array
from jobs_lib.jobs.position import WIDEST, Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jobs_lib.jobs.flight import Flight

_BATCH_SHARE = 16
_MOST_PER_ROW = 16.0
_JUMP = 50_000
_FEW_GROUPS = 50


class Windows:
    """The positions of the owned origins, and what is looked at next."""

    def __init__(self) -> None:
        self.positions: dict[str, Position] = {}
        self.prioritized = False
        """Whether there are jobs that are not of normal priority."""
        self._order: deque[str] = deque()
        self._asked: dict[tuple[str, int], int] = {}
        self._per_row = 1.0
        """Jobs that each row of a window leads to: groups come in lanes."""

    def add(self, origins: Mapping[str, int]) -> None:
        """Look at origins from their start, at these epochs."""
        for origin, epoch in origins.items():
            self.positions[origin] = Position(epoch)
        self._order = deque(self.positions)

    def leave(self, origins: Iterable[str]) -> None:
        """Forget origins."""
        for origin in origins:
            self.positions.pop(origin, None)
        self._order = deque(self.positions)

    def rewind(self) -> None:
        """Start again in all: what was passed over lies behind the cursors."""
        for position in self.positions.values():
            position.rewind()

    def hint(self, origin: str) -> None:
        """Somebody says that there is something new in this origin; "" is in any."""
        if position := self.positions.get(origin):
            position.deep = True
        elif not origin:
            for position in self.positions.values():
                position.deep = True

    # What is asked for

    def choose(self, active: Mapping[str, Position], room: int) -> list[str]:
        """The origins that may have more behind their cursors, in turn."""
        deep = [
            o for o in self._order if o in active and active[o].deep and active[o].seen
        ][:room]
        self._order.rotate(-len(deep))
        return deep

    def is_plain(self, origin: str) -> bool:
        """Whether what came last in an origin was plain, as more of it may be."""
        position = self.positions[origin]
        return position.plain and position.growth == 1 and not self.prioritized

    def prepare_plain(self, origin: str, room: int) -> dict[str, Any]:
        """The parameters of the query ``claim_plain`` that say where it looks."""
        position, size = self.positions[origin], max(2, room)
        position.deep = False
        self._asked = {(origin, 0): size}
        return {
            "origin": origin,
            "epoch": position.epoch,
            "cursor": position.cursor,
            "size": size,
        }

    def prepare(self, deep: list[str], room: int) -> dict[str, Any]:
        """The parameters of the query ``claim`` that say where it looks.

        Args:
            deep: origins to look at.
            room: for how many jobs there is room.
        """
        share = math.ceil(room / max(1, len(deep)))
        size = max(2, math.ceil(share / self._per_row))
        plain = [o for o in deep if self.positions[o].growth == 1]
        wide = [o for o in deep if self.positions[o].growth > 1]
        widths = [min(WIDEST, size * self.positions[o].growth) for o in wide]
        self._asked = dict.fromkeys(((o, 0) for o in plain), size)
        self._asked |= {(o, 0): width for o, width in zip(wide, widths, strict=True)}
        leveled: list[tuple[str, int, int]] = []
        for origin in deep:
            position = self.positions[origin]
            position.deep = False
            if self.prioritized:
                few = _take_turn(position, share)
                leveled += [(origin, 1, share)] + [(origin, -1, few)] * (few > 0)
                # Where the lowest was left out, there may still be some of it.
                position.deep = not few
        self._asked |= {(o, level): size for o, level, size in leveled}
        return {
            "window_origins": text_array(plain),
            "cursors": int_array(self.positions[o].cursor for o in plain),
            "sizes": int_array(size for _ in plain),
            "wide_origins": text_array(wide),
            "wide_cursors": int_array(self.positions[o].cursor for o in wide),
            "wide_sizes": int_array(widths),
            "caps": int_array(share for _ in wide),
            "level_origins": text_array([o for o, _, _ in leveled]),
            "levels": int_array(level for _, level, _ in leveled),
            "level_cursors": int_array(
                self.positions[o].levels[level] for o, level, _ in leveled
            ),
            "level_sizes": int_array(size for _, _, size in leveled),
        }

    # What was found

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
        """How far a window went.

        Args:
            origin: whose window it was.
            level: of priority.
            furthest: the highest id in it; None if nothing of it counts.
            count: of its rows.
            plain: whether all of them could be claimed by ``claim_plain``.
            barren: whether none of them could run.
        """
        position = self.positions[origin]
        position.found = True
        full = count >= self._asked[origin, level]
        if level:
            position.levels[level] = max(position.levels[level], furthest or 0)
        else:
            position.cursor = max(position.cursor, furthest or 0)
            position.plain = plain
            # What is not plain stops a plain claim: another one takes it.
            full = full or position.growth > 1 or not furthest or not plain
            wider = full and barren
            position.growth = min(position.growth * 4, WIDEST) if wider else 1
        position.deep |= full

    def note_lanes(self, lanes: int, cut: int) -> None:
        """Fewer windows' rows and longer lanes, while groups have more to give.

        Args:
            lanes: that a claim has opened.
            cut: how many of them have more behind them.
        """
        if cut * 2 > lanes > 8:
            self._per_row = min(_MOST_PER_ROW, self._per_row * 2)
        elif not cut:
            self._per_row = max(1.0, self._per_row / 2)

    # Past a busy group

    def prepare_jump(
        self, active: Mapping[str, Position], flight: Flight
    ) -> dict[str, Any] | None:
        """The parameters of the query ``jump``, where an origin is stuck in a group."""
        for origin, position in active.items():
            if position.growth >= WIDEST:
                busy = flight.lanes.keys() | flight.behind.keys()
                groups = [g for o, g in busy if o == origin]
                if groups and len(groups) < _FEW_GROUPS:
                    return {
                        "origin": origin,
                        "cursor": position.cursor,
                        "groups": text_array(groups),
                        "limit": _JUMP,
                    }
        return None

    def read_jump(
        self,
        asked: Mapping[str, Any],
        row: tuple[int | None, int | None, int],
        flight: Flight,
    ) -> None:
        """Go on behind the rows of the busy groups; their lanes reach those."""
        position = self.positions.get(asked["origin"])
        found, furthest, _ = row
        if position is None or furthest is None:
            return
        position.cursor = max(position.cursor, furthest if found is None else found - 1)
        position.growth = WIDEST if found is None else 1
        position.deep = True
        for (origin, _), lane in flight.lanes.items():
            if origin == asked["origin"]:
                lane.more = True


def _take_turn(position: Position, share: int) -> int:
    """How many of the lowest priority a claim looks at, beside ``share`` of the others.

    However high the load of the others is, one in sixteen is of the lowest; and where
    the last claim has found none of the others, the lowest has its turn at once.
    """
    few = share // _BATCH_SHARE
    if not few:
        position.left_out += 1
        again = position.left_out > 1 and not position.found
        few = int(again or position.left_out * share >= _BATCH_SHARE)
    if few:
        position.left_out = 0
    position.found = False
    return few
