"""Jobs passed over because enough of their value already wait in memory."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable

MOST = 250_000
"""How many ids are kept; if there are more, claims later look from the start."""


class Passed:
    """Ids by value and origin, in the order in which claims met them; for one thread.

    They lie behind the cursors, and nothing else leads to them.
    """

    def __init__(self) -> None:
        self.full: Callable[[], Collection[str]] = tuple
        """Values whose jobs claims may not take from ids ahead any more."""
        self.room: Callable[[str], int] = lambda value: 0
        """How many more of a value may wait in memory."""
        self.is_overflown = False
        """Whether some were forgotten."""
        self.hungry: set[str] = set()
        """Values that may have room for more jobs; any thread may add one."""
        self._ids: set[int] = set()
        self._lines: dict[str, dict[str, deque[int]]] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._ids

    @property
    def values(self) -> Collection[str]:
        """The values whose jobs were passed over."""
        return self._lines.keys()

    def add(self, origin: str, value: str, job_id: int) -> None:
        """Note a job that was passed over, even if it was before."""
        if job_id in self._ids:
            return
        if len(self._ids) >= MOST:
            self.is_overflown = True
            return
        self._ids.add(job_id)
        lines = self._lines.setdefault(value, {})
        lines.setdefault(origin, deque()).append(job_id)
        self.hungry.add(value)

    def take(
        self, active: Container[str], besides: Container[str]
    ) -> list[tuple[str, str, int]]:
        """The jobs that may be claimed now: values, origins and ids.

        Args:
            active: the origins that may be claimed from.
            besides: values whose jobs other claims already ask for.
        """
        taken: list[tuple[str, str, int]] = []
        again: list[str] = []
        while self.hungry:
            value = self.hungry.pop()
            lines = self._lines.get(value)
            if lines is None:
                continue
            room = 0 if value in besides else self.room(value)
            for origin in [origin for origin in lines if origin in active]:
                line = lines[origin]
                while line and room > 0:
                    taken.append((value, origin, line.popleft()))
                    room -= 1
                if not line:
                    del lines[origin]
            if not lines:
                del self._lines[value]
            elif room > 0 or value in besides:
                again.append(value)  # or its origins are paused, or about to leave
        self.hungry.update(again)
        self._ids.difference_update(job_id for _, _, job_id in taken)
        return taken

    def release(self, origins: Iterable[str]) -> None:
        """Forget the ids in released origins."""
        for origin in origins:
            for value in [v for v, lines in self._lines.items() if origin in lines]:
                self._ids.difference_update(self._lines[value].pop(origin))
                if not self._lines[value]:
                    del self._lines[value]

    def clear(self) -> None:
        """Forget all ids: the cursors start again."""
        self._lines.clear()
        self._ids.clear()
        self.is_overflown = False
