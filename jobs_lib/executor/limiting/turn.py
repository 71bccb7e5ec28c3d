"""Turns: a worker runs what waits behind a limit, one job after the other."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from jobs_lib.executor.limiting.slots import Holding

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.executor.lane import Item

_LONGEST = 50
"""Jobs and lanes of a turn, until others have theirs who wait for the same workers."""
FEW = 32
"""How many jobs of one value wait in memory at first."""


class Line:
    """The jobs of one value, or of all: what waits, and the turns that run it."""

    __slots__ = ("allowed", "held", "most", "ran", "turn", "turns", "value", "waiting")

    def __init__(
        self, value: str, end: Callable[[Line, bool], bool], *, is_async: bool
    ) -> None:
        """Make one that is empty.

        Args:
            value: of its jobs.
            end: see :class:`Turn`.
            is_async: whether its turns run on an event loop.
        """
        self.value = value
        self.most = FEW
        """Jobs that may wait here; of more, claims pass over the others."""
        self.waiting: deque[Item] = deque()
        self.turn = Turn(self, end, is_async=is_async)
        """What workers take, as often as there are turns."""
        self.turns = 0
        """How many workers have it, or will have it next."""
        self.allowed = 0
        """How many there may be: of more, one ends before its next job."""
        self.ran = 0
        """Jobs and lanes that were begun."""
        self.held = Holding()

    @property
    def needed(self) -> int:
        """Slots that would not be idle."""
        return self.turns + len(self.waiting)


class Turn:
    """As many workers as have it run the jobs of a line at once.

    A quick job costs hardly more than without a limit: nobody is asked before it.
    """

    __slots__ = ("_end", "_left", "_line", "is_async")

    def __init__(
        self, line: Line, end: Callable[[Line, bool], bool], *, is_async: bool
    ) -> None:
        """Prepare.

        Args:
            line: whose jobs it runs.
            end: notes that one turn of a line has ended. Unless it must end, as the
                second argument says, it returns False where something has come
                meanwhile, and the turn goes on.
            is_async: whether it runs on an event loop.
        """
        self._line = line
        self._end = end
        self._left = _LONGEST
        self.is_async = is_async

    def take(self) -> Item | None:
        """What to run next; None: this turn has ended."""
        line = self._line
        waiting = line.waiting
        while line.turns <= line.allowed:
            # Looked at first: an exception costs more than a quick job.
            if waiting:
                try:
                    item = waiting.popleft()
                except IndexError:
                    continue  # another turn has taken it
                line.ran += 1
                return item
            if self._end(line, False):
                return None
        self._end(line, True)
        return None

    def is_long(self) -> bool:
        """Whether others have their turn now; asked after each job."""
        self._left -= 1
        if self._left > 0:
            return False
        self._left = _LONGEST
        return True

    def abort(self) -> None:
        """The worker is gone, or runs something whose time is over."""
        self._end(self._line, True)
