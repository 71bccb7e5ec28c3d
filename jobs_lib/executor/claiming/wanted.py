"""Rows that claims ask for by id: nothing else leads to them.

They lie behind the cursors: promoted, committed late, found by a jump, or released.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from jobs_lib.executor.claiming.cursor import Cursor

_PATIENCE = 4
"""One claim in this number looks behind the cursors, whatever is asked for by id."""


class WantedRows:
    """Ids with their origins, in the order in which they came; used by one thread."""

    def __init__(
        self, cursors: Mapping[str, Cursor], in_flight: Container[int]
    ) -> None:
        """Want nothing yet.

        Args:
            cursors: of the owned origins; rows of others are not wanted.
            in_flight: jobs that claims do not ask for again.
        """
        self.extra: dict[int, str] = {}
        """Jobs that were promoted, late, or found by a jump."""
        self.hurried: dict[int, str] = {}
        """Jobs to claim before all others: they had begun when their process died."""
        self.asked: list[int] = []
        """The ids that the last claim asks for."""
        self._cursors = cursors
        self._in_flight = in_flight
        self._left_none = 0
        """How many claims in a row had no room for rows behind the cursors."""

    def add(self, rows: Mapping[int, str]) -> None:
        """Claim these, if their origin was not released meanwhile."""
        self.extra |= {i: o for i, o in rows.items() if o in self._cursors}

    def hurry(self, rows: Mapping[int, str]) -> None:
        """Claim these before all others."""
        self.hurried |= {i: o for i, o in rows.items() if o in self._cursors}

    def count(self, active: Container[str]) -> int:
        """Count the jobs that wait in the origins that may be claimed from."""
        return sum(origin in active for origin in self.extra.values())

    def choose(
        self, active: Mapping[str, Cursor], room: int, hurried: int
    ) -> list[tuple[str, int]]:
        """Origins and ids to ask for now.

        Args:
            active: the origins that may be claimed from.
            room: the number of jobs that there is room for.
            hurried: the number of hurried jobs that there is room for.
        """
        # Filtered before they are counted, so that waiting ones delay no other.
        rows = list(islice(self._find(self.hurried, active), max(room, hurried, 0)))
        rows += islice(self._find(self.extra, active), max(room - len(rows), 0))
        return rows

    def _find(
        self, rows: Mapping[int, str], active: Mapping[str, Cursor]
    ) -> Iterator[tuple[str, int]]:
        return (
            (origin, job_id)
            for job_id, origin in rows.items()
            if job_id not in self._in_flight
            and origin in active
            # Before the first poll the pauses are unknown.
            and active[origin].seen
        )

    def leave(self, room: int, asked: int) -> int:
        """The room for rows behind the cursors, which come after the wanted ids.

        There may always be more wanted ids, so some claims leave room all the same.

        Args:
            room: the number of jobs that there is room for.
            asked: the number of ids that the claim asks for.
        """
        left = room - asked
        self._left_none = self._left_none + 1 if left <= 0 else 0
        if left <= 0 and self._left_none % _PATIENCE == 0:
            return max(1, room // 2)
        return max(0, left)

    def forget_asked(self, skipped: Container[str]) -> None:
        """The last claim has answered for its ids, except in these origins."""
        for job_id in self.asked:
            for rows in (self.hurried, self.extra):
                if rows.get(job_id) not in skipped:
                    rows.pop(job_id, None)

    def release(self, origins: Container[str]) -> None:
        """Forget the ids of released origins."""
        self.extra = {i: o for i, o in self.extra.items() if o not in origins}
        self.hurried = {i: o for i, o in self.hurried.items() if o not in origins}

    def clear(self) -> None:
        """Forget all."""
        self.extra.clear()
        self.hurried.clear()
        self.asked = []
