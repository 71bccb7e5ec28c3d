"""The ids up to which nothing of a group is left, so that claims skip dead rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from jobs_lib.executor.claiming.in_flight import Group

_MOST = 1_000
_WORTH = 16
"""Walking over this number of a group's jobs costs as much as sending its floor."""


class GroupStarts:
    """The floors of the groups met most recently; used by one thread.

    While an old snapshot is held, finished rows stay in the table and in its indexes. A
    floor is an id: no row of the group exists up to it, and none can still appear.
    There are two exceptions: rows that an operator inserts, and rows of a transaction
    that drew their ids before it had a transaction id. Claims find such rows behind the
    cursor, and they lower the floor.
    """

    def __init__(self) -> None:
        self._known: dict[Group, tuple[int, int]] = {}
        """The floor, and how many jobs of the group claims took since it was found."""

    def find(self, group: Group) -> int:
        """The group's floor; 0 if none is known."""
        return self._known.get(group, (0, 0))[0]

    def choose(
        self, origins: Container[str], besides: Container[Group]
    ) -> list[tuple[str, str, int]]:
        """The floors in some origins that are worth sending, ``besides`` these."""
        return [
            (*group, floor)
            for group, (floor, taken) in self._known.items()
            if floor
            and taken >= _WORTH
            and group[0] in origins
            and group not in besides
        ]

    def note(self, group: Group, head: int, taken: int, low: int) -> None:
        """A claim took jobs of a group, from its head on.

        Args:
            group: of an origin.
            head: the first existing row of the group.
            taken: the number of jobs taken.
            low: the id up to which no row can appear in that origin.
        """
        floor, before = self._known.pop(group, (0, 0))
        floor = head - 1 if head <= floor else max(floor, min(head - 1, low))
        self._known[group] = floor, before + taken
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]

    def lower(self, group: Group, job_id: int) -> None:
        """A claim found a row of the group behind the cursor."""
        floor, taken = self._known.get(group, (0, 0))
        if job_id <= floor:
            self._known[group] = job_id - 1, taken

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()

    def release(self, origins: Iterable[str]) -> None:
        """Forget the floors of origins."""
        gone = frozenset(origins)
        self._known = {k: v for k, v in self._known.items() if k[0] not in gone}
