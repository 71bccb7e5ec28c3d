"""What happens to one of two partitions can happen to a single one.

So searches of systems with one partition say what those with several ones may do: see
`test_model.py`. This is the half of the members; `test_random_logs.py` has that of the
log.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.coordination.states import Back, Client, Part, Run, State
from tests.coordination.system import SHARED, Members

if TYPE_CHECKING:
    from collections.abc import Iterator

WALKS = 12
LENGTH = 40


class Projection:
    """Shows states of two partitions as those of a system of one of them."""

    def __init__(self, both: Members, partition: int) -> None:
        self.both = both
        self.partition = partition
        self.single = Members(
            both.processes, at_most_once=both.at_most_once, crashes=both.crashes
        )

    def show(self, state: State) -> State:
        """Leave the other partition out."""
        at = self.partition
        clients = [
            Client(one.processes, tuple(map(self._show_run, one.runs)))
            for one in state.clients
        ]
        positions, done = (state.positions[at],), (state.done[at],)
        return self.sort(State(state.crashes, positions, done, tuple(clients)))

    def sort(self, state: State) -> State:
        """Leave out killed runs of which nothing is left, and sort the others."""
        clients = [
            Client(
                one.processes,
                tuple(sorted(run for run in one.runs if run != self.single.dead_run)),
            )
            for one in state.clients
        ]
        return state._replace(clients=tuple(sorted(clients)))

    def step(self, state: State) -> Iterator[State]:
        """Yield what can follow in the system of one partition."""
        for _, reached in self.single.step(state):
            yield self.sort(reached)

    def _show_run(self, run: Run) -> Run:
        part: Part = run.parts[self.partition]
        hold = self.single._numbers.of(self.both._numbers.things[part.hold])
        parts = (part._replace(hold=hold),)
        return Run(
            run.alive, parts, tuple(self._list(run.queue)), tuple(self._list(run.inbox))
        )

    def _list(self, items: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
        """List those of a run's records that are about the partition."""
        for code, age in items:
            thing = self.both._numbers.things[code]
            message = thing.message if type(thing) is Back else thing
            if message.shared.partition != self.partition:
                continue
            shown = message._replace(shared=SHARED[0])
            if type(thing) is Back:
                shown = thing._replace(message=shown)
            yield self.single._numbers.of(shown), age


def find_foreign(both: Members) -> str | None:
    """Walk at random; name a step that a system of one partition does not have."""
    chance = random.Random(1)
    projections = [Projection(both, partition) for partition in range(2)]
    for _ in range(WALKS):
        state = both.begin()
        for _ in range(LENGTH):
            reached = list(both.step(state))
            for one in projections:
                before = one.show(state)
                can_come = {before, *one.step(before)}
                for name, after in reached:
                    if one.show(after) not in can_come:
                        return name
            state = chance.choice(reached)[1]
    return None


@pytest.mark.guarantee("I31")
@pytest.mark.parametrize("at_most_once", [False, True])
def test_each_step_of_two_partitions_is_one_of_a_single_partition(at_most_once):
    members = Members((1, 1), partitions=2, at_most_once=at_most_once, crashes=1)
    assert find_foreign(members) is None


class WatchesTheOther(Members):
    """What is on its way about one partition decides what is sent about the other."""

    def _find_unread(self, run: Run, partition: int) -> list[type]:
        return super()._find_unread(run, 1 - partition)


@pytest.mark.guarantee("I40")
def test_a_member_that_mixes_two_partitions_up_is_found():
    assert find_foreign(WatchesTheOther((1, 1), partitions=2)) is not None
