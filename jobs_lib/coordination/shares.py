"""Who is there, and how many partitions each member wants: no rule depends on it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from jobs_lib.coordination.messages import (
    ClaimingPartition,
    ReleaseGroup,
    ReleasingPartition,
    Shared,
)
from jobs_lib.coordination.patience import read_clock
from jobs_lib.coordination.world import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from jobs_lib.coordination.messages import Message, Sender
    from jobs_lib.coordination.world import World
    from jobs_lib.kafka.poller import Partition

Run = tuple[str, str]
"""A client, and an instance of it."""


class _Seen(NamedTuple):
    place: int
    time_ms: int
    interval_ms: int


class Attendance:
    """The members of a group that the log has seen lately.

    A member that has released all that it held is gone, until it is seen again.

    Each partition of the log has the clock of its leader, and no two of them can be
    compared. So this machine's clock says how long nothing was seen of a member. A
    machine that stands still misses members for a moment, and no rule depends on it.

    Args:
        group_id: the group.
        interval_ms: of a member that has stated none.
    """

    def __init__(self, group_id: str, interval_ms: int) -> None:
        self._group_id = group_id
        self._interval_ms = interval_ms
        self._now_ms: dict[int, int] = {}
        """By place of the log, its time."""
        self._seen: dict[Run, _Seen] = {}
        self._looked: dict[Run, tuple[_Seen, float]] = {}
        """What the last look found, and since when that is so by this machine."""
        self._holders: dict[Shared, Run] = {}
        self._held: Counter[Run] = Counter()

    def forget(self) -> None:
        """Forget all."""
        self._now_ms.clear()
        self._seen.clear()
        self._looked.clear()
        self._holders.clear()
        self._held.clear()

    def read(self, worlds: Iterable[World]) -> None:
        """Add those who hold something."""
        for world in worlds:
            self._now_ms[world.place] = world.now_ms
            for shared, (_, holding) in world.entries.items():
                if shared.group_id == self._group_id and holding is not None:
                    run = (holding.client_id, holding.instance_id)
                    self._hold(shared, run)
                    self._see(run, world.place, holding.last_ms, holding.interval_ms)

    def note(self, place: int, message: Message, outcome: Outcome, now_ms: int) -> None:
        """Note a record; each one but a pause says that a member lives."""
        self._now_ms[place] = now_ms
        if message.sender.group_id != self._group_id:
            return
        if isinstance(message, ReleaseGroup):
            return  # An operator's, who wants no share.
        run = (message.sender.client_id, message.sender.instance_id)
        interval_ms = 0
        if isinstance(message, ClaimingPartition):
            interval_ms = message.interval_ms
            if outcome is Outcome.VALID:
                self._hold(message.shared, run)
        elif isinstance(message, ReleasingPartition) and outcome is Outcome.VALID:
            self._let_go(message.shared)
            if not self._held[run]:
                self._seen.pop(run, None)
                self._looked.pop(run, None)
                return
        self._see(run, place, now_ms, interval_ms)

    def list_members(self) -> list[str]:
        """List the clients that were seen within two of their intervals."""
        now = read_clock()
        for run, seen in list(self._seen.items()):
            before, since = self._looked.get(run, (None, now))
            if before != seen:
                since = now - (self._now_ms[seen.place] - seen.time_ms) / 1000
            self._looked[run] = seen, since
            if now - since > 2 * seen.interval_ms / 1000:
                del self._seen[run], self._looked[run]
        return sorted({client for client, _ in self._seen})

    def find_holder(self, shared: Shared) -> Run | None:
        """Find who holds a partition, or has held it last and lets nothing be heard."""
        return self._holders.get(shared)

    def _see(self, run: Run, place: int, time_ms: int, interval_ms: int) -> None:
        known = self._seen.get(run)
        before = self._interval_ms if known is None else known.interval_ms
        self._seen[run] = _Seen(place, time_ms, max(interval_ms, before))

    def _hold(self, shared: Shared, run: Run) -> None:
        self._let_go(shared)
        self._holders[shared] = run
        self._held[run] += 1

    def _let_go(self, shared: Shared) -> None:
        run = self._holders.pop(shared, None)
        if run is not None:
            self._held[run] -= 1


def find_former(worlds: Iterable[World], sender: Sender) -> set[Shared]:
    """Find what other instances of a client hold, or held last."""
    return {
        shared
        for world in worlds
        for shared, (_, holding) in world.entries.items()
        if shared.group_id == sender.group_id
        and holding is not None
        and holding.client_id == sender.client_id
        and holding.instance_id != sender.instance_id
    }


def find_share(client_id: str, members: Sequence[str], parts: int) -> int:
    """Find how many of some partitions a member wants: shares differ by one at most.

    Args:
        client_id: the member; it counts whether or not it was seen.
        members: those that are there.
        parts: how many partitions there are.
    """
    ordered = sorted({*members, client_id})
    each, left = divmod(parts, len(ordered))
    return each + (ordered.index(client_id) < left)


def order_parts(
    client_id: str, members: Sequence[str], parts: Sequence[Partition]
) -> list[Partition]:
    """Order partitions so that members, who all want some, begin with other ones."""
    ordered = sorted({*members, client_id})
    own, count = ordered.index(client_id), len(ordered)
    return [
        parts[number]
        for number in sorted(range(len(parts)), key=lambda one: (one - own) % count)
    ]


def find_surplus(
    staying: Collection[Shared], shared: Sequence[Shared], share: int
) -> list[Shared]:
    """Find what a member leaves: what is shared no more, and what is above its share.

    Args:
        staying: what it has and does not leave yet.
        shared: all partitions, those first that it wants first.
        share: how many of them it wants.
    """
    rank = {one: number for number, one in enumerate(shared)}
    gone = [one for one in staying if one not in rank]
    kept = sorted((one for one in staying if one in rank), key=rank.__getitem__)
    return gone + kept[share:]
