"""Judges a run of members from the topic alone, and from what they have processed.

It is given all records of the log, and each process's own journal: a line for each
batch that its handler got. Nothing here knows a server or a clock of its own. All times
are those of the log.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    ReleasingPartition,
    Shared,
    Unreadable,
    decode,
)
from jobs_lib.coordination.world import Outcome, World
from tests.coordination.listener import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from jobs_lib.coordination.messages import Sender

Places = dict[int, list[tuple[int, int, bytes | None]]]
"""Of each partition of the log: the offset, append time and value of each record."""
Range = tuple[int, int]


@dataclass(frozen=True)
class Batch:
    """Records that a handler got, and the claim by which its process held them."""

    partition: int
    first: int
    end: int
    claim: int
    begun_ms: float | None = None
    """When its handler began, by the machine's clock of elapsed time; None if it has
    not ended."""
    done_ms: float | None = None


@dataclass(frozen=True)
class Told:
    """A position that a process has told, and how much it had processed then."""

    partition: int
    position: int
    claim: int
    done: int
    """How many of its batches had ended."""


@dataclass(frozen=True)
class Run:
    """One process: what it has processed, and how it has ended."""

    client_id: str
    instance_id: str
    batches: tuple[Batch, ...]
    may_lose: bool = False
    """Whether it was killed, or cut off from Kafka, and may have lost one batch."""
    may_repeat: bool = False
    """Whether it may have read the log anew: it begins again at what it has told."""
    told: tuple[Told, ...] = ()

    @property
    def who(self) -> tuple[str, str]:
        """Its names in the log."""
        return self.client_id, self.instance_id


@dataclass
class Holding:
    """From a valid claim of a partition until the next one."""

    sender: Sender
    claim: int
    begins: int | None
    """The position at the claim."""
    interval_ms: int
    last_ms: int
    claimed_ms: int
    """The append time of the claim."""
    kept_ms: list[int] = field(default_factory=list)
    """The append times of the records that have kept it."""
    is_released: bool = False
    ranges: list[Range] = field(default_factory=list)
    """Those that it has claimed to process at most once."""


@dataclass
class History:
    """What the log alone says."""

    holdings: defaultdict[Shared, list[Holding]] = field(
        default_factory=lambda: defaultdict(list)
    )
    faults: list[str] = field(default_factory=list)

    def find(self, run: Run, shared: Shared, claim: int) -> Holding | None:
        """Find the holding of a process by its claim."""
        for one in self.holdings[shared]:
            if one.claim == claim and one.sender[1:] == run.who:
                return one
        return None


def replay(places: Places, world: Callable[[int], World] = World) -> History:
    """Read the log of each place, and note who held what, and what breaks a rule."""
    history = History()
    for place, records in places.items():
        _Replay(history, place, world(place)).read(records)
    return history


class _Replay:
    """Reads one partition of the log by two readers that share no code."""

    def __init__(self, history: History, place: int, world: World) -> None:
        self._history = history
        self._place = place
        self._world = world
        self._listener = Listener(place)
        self._held: dict[Shared, Holding] = {}

    def read(self, records: Iterable[tuple[int, int, bytes | None]]) -> None:
        for next_offset, (offset, time_ms, value) in enumerate(records):
            if offset != next_offset:
                self._blame(offset, f"comes where {next_offset} was next")
                return
            outcome = self._world.apply(offset, time_ms, value)
            self._listener.hear(offset, time_ms, value)
            self._compare_worlds(offset)
            found = decode(value)
            if not isinstance(found, Unreadable):
                self._note(offset, time_ms, found[1], outcome)

    def _note(self, offset: int, time_ms: int, said: Any, outcome: Outcome) -> None:
        shared: Shared | None = getattr(said, "shared", None)
        if shared is None:
            return
        self._compare(offset, shared)
        if outcome is not Outcome.VALID:
            return
        old = self._held.get(shared)
        if isinstance(said, ClaimingPartition):
            if old is not None:
                self._judge_takeover(offset, said, old)
            # A claim leaves the position as it is.
            position, now_ms = self._world.find(shared).position, self._world.now_ms
            one = Holding(
                said.sender, offset, position, said.interval_ms, now_ms, time_ms
            )
            self._held[shared] = one
            self._history.holdings[shared].append(one)
        elif old is None or (old.sender, old.claim) != (said.sender, said.claim):
            self._blame(offset, f"counts, and {said.sender.client_id} holds nothing")
        elif isinstance(said, ReleasingPartition):
            old.is_released = True
            del self._held[shared]
        elif isinstance(said, (Heartbeat, ClaimingMessages)):
            old.last_ms = self._world.now_ms
            old.kept_ms.append(time_ms)
            if isinstance(said, ClaimingMessages):
                self._note_range(offset, shared, old, said)

    def _compare_worlds(self, offset: int) -> None:
        """Compare both readers about the time, the partitions and the pauses."""
        world, listener = self._world, self._listener
        pauses = {group: (one[0], one[1:]) for group, one in world.pauses.items()}
        ours = world.now_ms, world.partitions, pauses
        theirs = listener.time, listener.n, listener.pauses
        if ours != theirs:
            self._blame(offset, f"lets two readers differ: {ours} and {theirs}")

    def _compare(self, offset: int, shared: Shared) -> None:
        """Compare both readers about the partition of a record."""
        position, holding = self._world.find(shared)
        ours = None if holding is None else (holding[:2], *holding[2:])
        holder = self._listener.holders.get((*shared,))
        theirs = None if holder is None else tuple(holder.values())
        if (position, ours) != (self._listener.positions.get((*shared,)), theirs):
            self._blame(offset, f"lets two readers differ: {ours} and {theirs}")

    def _judge_takeover(
        self, offset: int, said: ClaimingPartition, old: Holding
    ) -> None:
        age = self._world.now_ms - old.last_ms
        is_restart = (
            said.sender.client_id == old.sender.client_id
            and said.sender.instance_id != old.sender.instance_id
        )
        if age <= 2 * old.interval_ms and not (is_restart and age >= old.interval_ms):
            self._blame(
                offset,
                f"lets {said.sender.client_id} hold {said.shared} beside "
                f"{old.sender.client_id}, who was heard {age} ms before",
            )

    def _note_range(
        self, offset: int, shared: Shared, old: Holding, said: ClaimingMessages
    ) -> None:
        before = _list_ranges(self._history.holdings[shared])
        if (said.first or 0) < max((end for _, end in before), default=0):
            self._blame(offset, f"claims {said.first} of {shared} again")
        old.ranges.append((said.first or 0, said.end))

    def _blame(self, offset: int, what: str) -> None:
        self._history.faults.append(f"{self._place}@{offset} {what}")


def find_lost_claims(history: History, runs: Iterable[Run], topic: str) -> list[str]:
    """Name the batches that a process got without holding their partition."""
    return [
        f"{run.client_id} processed {batch} without a valid claim"
        for run in runs
        for batch in run.batches
        if history.find(run, name_partition(history, topic, batch), batch.claim) is None
    ]


def judge_at_most_once(
    history: History, runs: list[Run], topic: str, ends: Mapping[int, int]
) -> list[str]:
    """Name what breaks the delivery at most once.

    Each batch was claimed before, and no record comes twice. A process that was killed
    or cut off may lose one batch, and no other one any.

    Args:
        history: what the log says.
        runs: all processes.
        topic: the one that they have read.
        ends: of its partitions, whose records begin at 0.
    """
    faults = [*history.faults, *find_lost_claims(history, runs, topic)]
    counts = _count(runs)
    faults += [f"{one} was processed {n} times" for one, n in counts.items() if n > 1]
    claimed: dict[tuple[int, int], tuple[str, str]] = {}
    for shared, holdings in history.holdings.items():
        for holding in holdings:
            for _, end in holding.ranges:
                claimed[shared.partition, end] = holding.sender[1:]
    lost: defaultdict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for place, who in claimed.items():
        lost[who].add(place)
    for run in runs:
        for batch in run.batches:
            if claimed.get((batch.partition, batch.end)) != run.who:
                faults.append(f"{run.client_id} never claimed {batch}")
            lost[run.who].discard((batch.partition, batch.end))
    losers = {run.who for run in runs if run.may_lose}
    faults += [
        f"{who} lost {len(places)} batches that it had claimed, to {sorted(places)}"
        for who, places in lost.items()
        if len(places) > (who in losers)
    ]
    known = _list_claimed(history)
    faults += [
        f"{partition} of {topic} was claimed to {known.get(partition, 0)}, not to {end}"
        for partition, end in ends.items()
        if known.get(partition, 0) != end
    ]
    return faults


def judge_at_least_once(
    history: History, runs: list[Run], topic: str, ends: Mapping[int, int], most: int
) -> list[str]:
    """Name what breaks the delivery at least once.

    No record is missing. The batches of a holding follow each other from its position
    on. The next one begins at the end of a holding that was released, and at most so
    many records before the end of another one.

    Args:
        history: what the log says.
        runs: all processes.
        topic: the one that they have read.
        ends: of its partitions, whose records begin at 0.
        most: records that one holding may leave to be repeated: see `count_repeats`.
    """
    faults = [*history.faults, *find_lost_claims(history, runs, topic)]
    counts = _count(runs)
    missing = [
        (partition, offset)
        for partition, end in ends.items()
        for offset in range(end)
        if (partition, offset) not in counts
    ]
    if missing:
        faults.append(f"{len(missing)} were never processed: {missing[:5]}")
    processed = _follow(history, runs, topic, most, faults)
    for shared, holdings in history.holdings.items():
        for one, successor in itertools.pairwise(holdings):
            end = processed.get((shared, one.claim))
            if end is None:
                continue
            repeated = end - (successor.begins or 0)
            if repeated > (0 if one.is_released else most):
                how = "released" if one.is_released else "lost"
                faults.append(
                    f"{shared} was processed to {end} by {one.sender.client_id}, who "
                    f"{how} it, and goes on at {successor.begins}"
                )
    return faults


def count_repeats(batch: int, interval: float, seconds: float) -> int:
    """Count the records that a kill or a stall may repeat.

    Since the last heartbeat was sent, batches were begun for one interval at most. One
    was running then.

    Args:
        batch: records of a batch.
        interval: of the members, in seconds.
        seconds: that the handler takes for a batch, at least.
    """
    return batch * (math.floor(interval / seconds) + 2)


def _follow(
    history: History, runs: list[Run], topic: str, most: int, faults: list[str]
) -> dict[tuple[Shared, int], int]:
    """Follow the batches of each holding; return where its last one ended."""
    ends: dict[tuple[Shared, int], int] = {}
    for run in runs:
        for batch in run.batches:
            shared = name_partition(history, topic, batch)
            holding = history.find(run, shared, batch.claim)
            if holding is None:
                continue
            wanted = ends.get((shared, batch.claim), holding.begins or 0)
            if not 0 <= wanted - batch.first <= (most if run.may_repeat else 0):
                faults.append(f"{run.client_id} got {batch}, and {wanted} was next")
            ends[shared, batch.claim] = batch.end
    return ends


def _count(runs: Iterable[Run]) -> Counter[tuple[int, int]]:
    return Counter(
        (batch.partition, offset)
        for run in runs
        for batch in run.batches
        for offset in range(batch.first, batch.end)
    )


def _list_claimed(history: History) -> dict[int, int]:
    """The end of what was claimed of each partition."""
    found: dict[int, int] = {}
    for shared, holdings in history.holdings.items():
        for _, end in _list_ranges(holdings):
            found[shared.partition] = max(end, found.get(shared.partition, 0))
    return found


def _list_ranges(holdings: Iterable[Holding]) -> Iterator[Range]:
    return itertools.chain.from_iterable(one.ranges for one in holdings)


def name_partition(history: History, topic: str, batch: Batch) -> Shared:
    """Name a batch's partition; all members are of one group."""
    group = next((one.group_id for one in history.holdings), "")
    return Shared(group, topic, batch.partition)
