"""The small system with fewer states, where nobody can tell the difference.

That holds at most once, if nobody is killed, if no client has two processes, and if a
member has one record on its way at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.coordination.states import State, find_holder, replace_part, replace_run
from tests.coordination.system import Members

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Reduced(Members):
    """Members that share partitions at most once."""

    at_most_once: bool = True
    alone: bool = True

    def step(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield all that can happen next.

        A member reads a record back as soon as it is in the log. It does nothing else
        before, and does not see what happens meanwhile.
        """
        for name, reached in super().step(state):
            yield name, self._read_all(reached)

    def _read_all(self, state: State) -> State:
        for at, client in enumerate(state.clients):
            for number, run in enumerate(client.runs):
                if run.inbox:
                    return self._read_all(self._read(state, at, number)[1])
        return state

    def _pass_time(self, state: State) -> Iterator[tuple[str, State]]:
        """Let a holding that is not renewed become stale, each by itself.

        Time does no more to others than that, and makes older ones stale first.
        """
        runs = [list(one.runs) for one in state.clients]
        for partition in range(self.partitions):
            if (holder := find_holder(runs, partition)) is None:
                continue
            run = runs[holder[0]][holder[1]]
            part = run.parts[partition]._replace(age=self.oldest)
            stale = replace_part(run, part, partition)
            yield "time passes", replace_run(state, *holder, stale)
