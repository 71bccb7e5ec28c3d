"""A search through all states that a system can come to."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class BrokenError(Exception):
    """A step has broken what must hold."""


class System(Protocol):
    """States are tuples of small numbers, and equal if nothing can tell them apart."""

    def begin(self) -> Any:
        """Return the first state."""

    def step(self, state: Any) -> Iterator[tuple[str, Any]]:
        """Yield the name and the outcome of each step that may come next.

        Raises:
            BrokenError: such a step breaks what must hold.
        """

    def is_done(self, state: Any) -> bool:
        """Whether all work is done."""


class Found(NamedTuple):
    """What a search has seen."""

    states: int
    steps: Counter[str]
    """How often each kind of step was taken."""
    broken: str | None
    """What does not hold; None if all does."""
    trace: list[str]
    """The steps that lead there, the shortest way."""
    stuck: int
    """States from which the work cannot be done though nobody crashes any more."""

    def __str__(self) -> str:
        if self.broken is not None:
            return f"{self.broken} after {' → '.join(self.trace)}"
        return f"{self.states:,} states, {sum(self.steps.values()):,} steps"


def search(system: System, *, crashes: frozenset[str], most: int) -> Found:
    """Visit each state that steps lead to, and follow each step from there.

    The search is complete: it ends when no state is left that it has not followed. A
    state is remembered by its 64-bit hash, so two of a few million are taken for one
    about once in a million searches.

    Args:
        system: what is searched.
        crashes: kinds of steps that nobody may need in order to get on.
        most: how many states there may be.

    Raises:
        MemoryError: there are more states.
    """
    first = system.begin()
    numbers = {hash(first): 0}
    came_from, came_by = array("q", [-1]), [""]
    targets, ends, done = array("q"), array("q"), array("b")
    steps: Counter[str] = Counter()
    left = deque([first])
    number = -1
    while left:
        state = left.popleft()
        number += 1
        done.append(system.is_done(state))
        try:
            for name, reached in system.step(state):
                steps[name] += 1
                key = hash(reached)
                target = numbers.get(key)
                if target is None:
                    target = numbers[key] = len(numbers)
                    came_from.append(number)
                    came_by.append(name)
                    left.append(reached)
                if name not in crashes:
                    targets.append(target)
        except BrokenError as error:
            trace = []
            while number > 0:
                trace.append(came_by[number])
                number = came_from[number]
            return Found(len(numbers), steps, str(error), trace[::-1], 0)
        ends.append(len(targets))
        if len(numbers) > most:
            raise MemoryError(f"more than {most:,} states")
    stuck = done.count(0) - _count_saved(targets, ends, done)
    return Found(len(numbers), steps, None, [], stuck)


def _count_saved(targets: array[int], ends: array[int], done: array[int]) -> int:
    """Count the states that are not done, and from which one leads on to one that is.

    The targets of state ``i`` are ``targets[ends[i - 1]:ends[i]]``.
    """
    saved = bytearray(done)
    before = sum(saved)
    changed = True
    # Most steps lead to later states, so that a few rounds from the end are enough.
    while changed:
        changed = False
        for state in range(len(ends) - 1, -1, -1):
            if not saved[state]:
                begin = ends[state - 1] if state else 0
                for target in targets[begin : ends[state]]:
                    if saved[target]:
                        saved[state] = changed = True
                        break
    return sum(saved) - before
