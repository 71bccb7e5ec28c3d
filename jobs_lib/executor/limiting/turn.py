"""Turns: a worker runs the jobs that wait behind a limit, one after the other."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from jobs_lib.executor.limiting.slots import Holding

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.executor.lane import Item

_LONGEST = 50
"""Jobs and lanes of a turn, before other work gets the same worker."""
FEW = 32
"""Jobs of one value that may wait in memory at first."""


class Line:
    """The waiting jobs of one value, or of all values, and the turns that run them."""

    __slots__ = ("allowed", "held", "most", "ran", "turn", "turns", "value", "waiting")

    def __init__(
        self, value: str, end: Callable[[Line, bool], bool], *, is_async: bool
    ) -> None:
        """Make an empty line.

        Args:
            value: the value of its jobs.
            end: see :class:`Turn`.
            is_async: whether its turns run on an event loop.
        """
        self.value = value
        self.most = FEW
        """The number of jobs that may wait here; claims pass over further ones."""
        self.waiting: deque[Item] = deque()
        self.turn = Turn(self, end, is_async=is_async)
        """The object that workers take, once for each turn."""
        self.turns = 0
        """The number of workers that have a turn, or will have one next."""
        self.allowed = 0
        """The turns allowed: if there are more, one ends before its next job."""
        self.ran = 0
        """Jobs and lanes that were begun."""
        self.held = Holding()

    @property
    def needed(self) -> int:
        """The number of slots that would be in use."""
        return self.turns + len(self.waiting)


class Turn:
    """Lets a worker run jobs of a line; several workers may have the same turn at once.

    A quick job costs hardly more than without a limit: it needs no statement.
    """

    __slots__ = ("_end", "_left", "_line", "is_async")

    def __init__(
        self, line: Line, end: Callable[[Line, bool], bool], *, is_async: bool
    ) -> None:
        """Prepare.

        Args:
            line: the line whose jobs it runs.
            end: notes that one turn of a line has ended. If the second argument is
                False and jobs have come meanwhile, it returns False and the turn goes
                on.
            is_async: whether it runs on an event loop.
        """
        self._line = line
        self._end = end
        self._left = _LONGEST
        self.is_async = is_async

    def take(self) -> Item | None:
        """Take what to run next; None if this turn has ended."""
        line = self._line
        waiting = line.waiting
        while line.turns <= line.allowed:
            # Check first: an exception costs more than a quick job.
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
        """Whether other work should get the worker now; called before each job."""
        self._left -= 1
        if self._left > 0:
            return False
        self._left = _LONGEST
        return True

    def abort(self) -> None:
        """End the turn: its worker is gone, or runs a job whose time is over."""
        self._end(self._line, True)
