"""Groups whose next lane a claim asks for by name: their last one has just ended."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from jobs_lib.executor.claiming.rows import BEHIND, ENDS, FOREIGN, PASSED
from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from jobs_lib.executor.claiming.cursor import Cursor
    from jobs_lib.executor.claiming.early_ends import EarlyEnds
    from jobs_lib.executor.claiming.group_starts import GroupStarts
    from jobs_lib.executor.claiming.in_flight import Group, InFlight
    from jobs_lib.executor.claiming.rows import ClaimRow
    from jobs_lib.executor.lane import Lane

_LEAST = 8
"""For how many groups one claim asks for the next lane, at least."""

Shared = tuple[str, str, str | None]
"""A group that another section handles: origin, group, and the type with which it goes
on; None if it may only have more behind its jobs in flight. The group "" stands for all
groups of the origin."""


class NextGroups:
    """Where groups go on, here and in other sections; used by one thread."""

    def __init__(
        self, in_flight: InFlight, group_starts: GroupStarts, others: Container[str]
    ) -> None:
        """Ask for no group yet.

        Args:
            in_flight: the lanes of groups, and where groups go on behind them.
            group_starts: up to where nothing of a group is left.
            others: the types of other sections.
        """
        self.asked: dict[Group, int] = {}
        """Groups that the last claim asks for by name, and an id to begin behind; 0
        means from their floor on."""
        self.shared: list[Shared] = []
        """Groups to pass on to other sections."""
        self.jumped: dict[str, int] = {}
        """Origins where jumps have passed over groups that are passed on, and the ids
        behind which they did."""
        self._in_flight = in_flight
        self._group_starts = group_starts
        self._others = others

    def choose(
        self, active: Mapping[str, Cursor], room: int
    ) -> list[tuple[str, str, int]]:
        """Origins and groups that go on, and the ids behind which they do.

        Args:
            active: the origins that may be claimed from.
            room: the number of jobs that there is room for.
        """
        if room <= 0:
            return []
        found = (
            (origin, group, at)
            for (origin, group), at in self._in_flight.behind.items()
            if origin in active
        )
        # A few long lanes cost least; the others come with the next claim.
        return list(islice(found, max(_LEAST, room // _LEAST)))

    def ask(self, behind: list[tuple[str, str, int]]) -> None:
        """The claim being prepared asks for these."""
        self.asked = {(o, g): at for o, g, at in behind}

    def parameters(self, touched: list[str], early_ends: EarlyEnds) -> dict[str, Any]:
        """The parameters of the query ``claim`` about groups.

        Args:
            touched: the origins that the claim looks at.
            early_ends: says in which groups only the last job runs.
        """
        # If a group is asked for anyway, the claim need not look for its head.
        busy = self._in_flight.lanes.keys() | self.asked
        floors = self._group_starts.choose(touched, busy)
        return {
            "busy_origins": text_array([o for o, _ in busy]),
            "busy_groups": text_array([g for _, g in busy]),
            "floor_origins": text_array([o for o, _, _ in floors]),
            "floor_groups": text_array([g for _, g, _ in floors]),
            "floor_ids": int_array(floor for _, _, floor in floors),
            "next_origins": text_array([o for o, _ in self.asked]),
            "next_groups": text_array([g for _, g in self.asked]),
            "next_ids": int_array(
                at or self._group_starts.find(key) for key, at in self.asked.items()
            ),
            "next_piles": [early_ends.is_pile(key) for key in self.asked],
        }

    def forget_asked(self, skipped: Container[str]) -> None:
        """The claim has answered for its groups, except in these origins."""
        for key in self.asked:
            if key[0] not in skipped:
                self._in_flight.behind.pop(key, None)

    def note_lanes(
        self, lanes: Mapping[Group, Lane], cursors: Mapping[str, Cursor]
    ) -> None:
        """Note where the groups of new lanes begin, and how far the lanes reach."""
        for key, lane in lanes.items():
            lane.top = lane.jobs[-1].id
            # Behind any other id the claim has not looked for the group's head.
            if not self.asked.get(key):
                low = cursors[key[0]].swept_below
                self._group_starts.note(key, lane.jobs[0].id, len(lane.jobs), low)

    def note(self, row: ClaimRow, seq: int) -> None:
        """Note a claim's row about a group.

        Args:
            row: its kind says what it means.
            seq: the claim's number.
        """
        key = row.origin, str(row.group)
        lane = self._in_flight.lanes.get(key)
        if row.kind == PASSED:
            flying = row.id in self._in_flight.jobs
            if lane:
                # A lane of this same claim has read what there is behind its rows.
                if not (flying and lane.seq == seq):
                    lane.note_passed(row.id)
            elif not flying:
                # The claim asked for the group by name, and found nothing to run behind
                # that id. This row may lie before it.
                self._in_flight.late[row.id] = row.origin
        elif row.kind == ENDS:
            if lane:
                lane.more = True
        elif row.kind == FOREIGN:
            # Another app itself finds where its groups go on.
            if row.type in self._others:
                self.shared.append((*key, row.type))
        elif row.kind == BEHIND and self._others:
            self.shared.append((*key, None))

    def note_jump(self, origin: str, low: int) -> None:
        """A jump has passed over groups whose head others may have in flight.

        Args:
            origin: of the groups.
            low: the id behind which it did.
        """
        if self._others:
            # Only they reach the jobs behind it.
            self.shared.append((origin, "", None))
            self.jumped[origin] = min(low, self.jumped.get(origin, low))

    def take_shared(self) -> list[Shared]:
        """The groups to pass on to other sections; each is returned once."""
        shared, self.shared = self.shared, []
        return shared

    def take_jumped(self) -> dict[str, int]:
        """Where to look once more when the other sections have heard of the groups."""
        jumped, self.jumped = self.jumped, {}
        return jumped

    def follow(self, origin: str, group: str) -> None:
        """Go on with a group that another section has passed on.

        Args:
            origin: of the group, owned.
            group: its name; "" for all groups that are in flight there.
        """
        # The job that the other section has met may stand in front of others.
        if not group:
            self._in_flight.note_passed(origin, 0)
        elif lane := self._in_flight.lanes.get((origin, group)):
            lane.note_passed(0)
        else:
            # Even if it is not known to go on here: its lane may have ended since the
            # other section looked.
            self._in_flight.behind.setdefault((origin, group), 0)
