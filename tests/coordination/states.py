"""What a state of the small system is made of: sorted tuples of small numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    ReleasingPartition,
)
from tests.coordination.search import BrokenError

if TYPE_CHECKING:
    from jobs_lib.coordination.world import Outcome

AboutPartition: TypeAlias = (
    ClaimingPartition | Heartbeat | ClaimingMessages | ReleasingPartition
)
# Messages are seen by their sender: it is `ME`, and its claims have small numbers.

NONE = -1


class Part(NamedTuple):
    """What one run of a client has to do with one partition."""

    hold: int
    """A `Hold`, by its number."""
    sent: int
    """The age of the sending of the last record that was read back as valid."""
    busy: int
    """The record that it processes."""
    next: int
    """The record that it processes next."""
    claim: int
    """By which it holds the partition in the world."""
    age: int
    """Of that holding."""
    confirmed: int


class Run(NamedTuple):
    """One run of a client: a process, or what a killed one has left."""

    alive: int
    parts: tuple[Part, ...]
    queue: tuple[tuple[int, int], ...]
    """What was sent and not yet appended: the message by its number, and its age."""
    inbox: tuple[tuple[int, int], ...]
    """What was appended and not yet read back: a `Back` by its number."""


class Client(NamedTuple):
    """All runs of a client; so many processes of it may run at once."""

    processes: int
    runs: tuple[Run, ...]


class State(NamedTuple):
    """All that matters for what can come."""

    crashes: int
    """How many processes may still be killed."""
    positions: tuple[int, ...]
    done: tuple[int, ...]
    """For each partition the records that were processed, as bits."""
    clients: tuple[Client, ...]


class Back(NamedTuple):
    """What a member learns when it reads its own record back."""

    message: AboutPartition
    offset: int
    outcome: Outcome
    position: int


class Numbers:
    """Gives each thing a number: states of numbers are quick to hash."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def of(self, thing: Any) -> int:
        """Return its number."""
        # Named tuples of equal values are equal, whatever their types are.
        key = (type(thing), type(thing[0]), thing)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.things)
            self.things.append(thing)
        return number


def freeze(state: State, clients: list[list[Run]]) -> State:
    """Make a state of runs; the order of equals means nothing."""
    found = [
        Client(one.processes, tuple(sorted(runs)))
        for one, runs in zip(state.clients, clients, strict=True)
    ]
    found.sort()
    return State(state.crashes, state.positions, state.done, tuple(found))


def replace_run(state: State, at: int, number: int, run: Run) -> State:
    """Replace a run of a client."""
    client = state.clients[at]
    runs = list(client.runs)
    runs[number] = run
    runs.sort()
    clients = list(state.clients)
    clients[at] = Client(client.processes, tuple(runs))
    clients.sort()
    return State(state.crashes, state.positions, state.done, tuple(clients))


def replace_part(run: Run, part: Part, partition: int) -> Run:
    """Replace what a run has to do with a partition."""
    parts = (*run.parts[:partition], part, *run.parts[partition + 1 :])
    return Run(run.alive, parts, run.queue, run.inbox)


def find_holder(clients: list[list[Run]], partition: int) -> tuple[int, int] | None:
    """Find the run that holds a partition in the world."""
    found = [
        (at, number)
        for at, runs in enumerate(clients)
        for number, run in enumerate(runs)
        if run.parts[partition].claim != NONE
    ]
    if len(found) > 1:
        raise BrokenError("two hold a partition")
    return found[0] if found else None


def mark(done: tuple[int, ...], partition: int, record: int) -> tuple[int, ...]:
    """Note that a record was processed."""
    marked = list(done)
    marked[partition] |= 1 << record
    return tuple(marked)


def mark_once(done: tuple[int, ...], partition: int, record: int) -> tuple[int, ...]:
    """Note it; nobody may have processed it before."""
    if done[partition] >> record & 1:
        raise BrokenError("a record is processed twice")
    return mark(done, partition, record)
