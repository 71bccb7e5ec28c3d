"""Slots: rows that say which process may run how many jobs of a limited type.

A limit of four has four slots, or four for each value. A process runs no more jobs than
it holds slots, and keeps them while it has jobs to run, so a quick job costs no
statement. A process that needs a slot marks a row of the process with the most slots;
that process releases it as soon as a job has ended.

The rows are taken before a job starts and deleted after it has ended. A slot counts
only while the lease under which it was taken lasts. So no more jobs run than there are
slots, whatever dies: the slots of a dead process are free once its lease is over.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from uuid import UUID

    from jobs_lib.executor.round_trip import Statement
    from jobs_lib.executor.section import Section
    from jobs_lib.ownership.lease import Lease

_SHORTEST_PAUSE = 0.01
_LONGEST_PAUSE = 0.1
"""Seconds between two attempts to get a slot that other processes hold."""
_YIELD_PAUSE = 0.3
"""Seconds for which a slot that was released for other processes is left to them."""
_MOST_ASKED = 500
"""Values for which one statement asks for slots."""
_WATCH_PAUSE = 0.1
"""Seconds between two checks of whether other processes want a slot."""
_DEAD_PAUSE = 1.0
"""Seconds between two checks of whether the process that holds it is dead."""
_KEPT = 1.0
"""Seconds for which a slot that no job here needs is kept."""
_BUSY_PAUSE = 0.05
"""Seconds in which a job of each value ends, if quick jobs of many values run."""
_FORGOTTEN = 0.5
"""After this many seconds it must be measured again how quickly jobs end."""
_HELD = 0.5
"""The shortest time, in seconds, for which a slot that jobs here need is held, even if
other processes want it."""


class Holding:
    """The slots of one value that this process holds; under the limiter's lock."""

    __slots__ = ("asked_at", "count", "idle_since", "is_quick", "pause", "seen",
                 "since", "wanted")  # fmt: skip

    def __init__(self) -> None:
        self.count = 0
        self.is_quick = True
        """Whether its jobs end so quickly that more slots would not help."""
        self.seen = 0
        """How many jobs had begun when it was last checked whether to ask for slots."""
        self.since = 0.0
        """When the last slot was taken."""
        self.idle_since = 0.0
        """When the last job ended, and none was left."""
        self.asked_at = 0.0
        self.pause = 0.0
        self.wanted = 0
        """Slots that other processes want."""


class Slots:
    """Makes the statements that take and release the slots of a type; sends nothing.

    Args:
        section: the type's section.
        owner: the process.
        lease: returns the process's current lease.
        stale_after: seconds without a heartbeat after which a process counts as dead.
        sees_others: whether every living process has had time to beat.
    """

    def __init__(
        self,
        section: Section,
        owner: UUID,
        lease: Callable[[], Lease],
        stale_after: float,
        sees_others: Callable[[], bool],
    ) -> None:
        assert section.limit is not None
        self.most = section.limit.most
        self.by_value = section.limit.parameter is not None
        self._shared = {"type": section.type_name, "owner": owner}
        self._get_lease = lease
        self.lease = lease()
        """The lease under which the slots were taken."""
        self._stale_after = stale_after
        self._sees_others = sees_others
        self._lost = True
        """Whether the rows may differ from what is known here."""
        self._watch_at = self._dead_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether no job may start on the slots: others may have taken them."""
        return self._lost or self._get_lease() is not self.lease or self.lease.is_over()

    @property
    def is_barred(self) -> bool:
        """Whether the process may take no slots: others may take it for dead."""
        return self._get_lease().is_over()

    def doubt(self) -> None:
        """Commits or slots may be lost: count the held slots again."""
        self._lost = True

    def choose_idle(
        self, holdings: Iterable[tuple[str, Holding, int]]
    ) -> dict[str, int]:
        """Choose how many slots of each value to release.

        Args:
            holdings: values, the held slots of each, and how many jobs need one.
        """
        now = time.monotonic()
        idle: dict[str, int] = {}
        for value, held, needed in holdings:
            spare = held.count - needed
            if spare > 0 and (held.wanted or now - held.idle_since > _KEPT):
                idle[value] = spare
            elif held.wanted and now - held.since > _HELD:
                idle[value] = min(held.wanted, held.count)
        return idle

    def choose_wanted(
        self, lacking: Iterable[tuple[str, Holding, int, int]], *, busy: bool
    ) -> dict[str, int]:
        """Choose how many more slots of each value to ask for.

        At first it is one slot. More are asked for only if jobs wait for other systems
        while they run: quick jobs leave the slots to other processes.

        Args:
            lacking: values, the held slots of each, how many jobs have begun, and how
                many more slots they could use.
            busy: whether the workers end jobs as quickly as Python can.
        """
        now = time.monotonic()
        wanted: dict[str, int] = {}
        for value, held, ran, jobs in lacking:
            since = now - held.asked_at
            if since < held.pause:
                continue
            # If the last check was long ago, measure first and decide at the next one.
            held.is_quick = since > _FORGOTTEN or (busy and ran > held.seen)
            held.seen = ran
            if held.count and held.is_quick:
                held.asked_at, held.pause = (
                    now,
                    _BUSY_PAUSE if busy else _SHORTEST_PAUSE,
                )
                continue
            more = min(self.most - held.count, jobs, max(1, held.count))
            if more > 0:
                wanted[value] = more
                if len(wanted) == _MOST_ASKED:
                    break
            else:
                held.asked_at, held.pause = now, _LONGEST_PAUSE
        return wanted

    def prepare(
        self, idle: Mapping[str, int], wanted: Mapping[str, int], *, holds: bool
    ) -> list[Statement]:
        """Make the statements that are due now, to be sent in this order.

        Args:
            idle: slots to release, by value.
            wanted: slots to take, by value.
            holds: whether any slot is held.
        """
        now = time.monotonic()
        statements: list[Statement] = []
        if idle:
            statements.append(("give_slots_back", self._shared | _list(idle)))
        if wanted:
            if now >= self._dead_at and self._sees_others():
                self._dead_at = now + _DEAD_PAUSE
                dead = {"stale_after": self._stale_after, "sees_others": True}
                statements.append(("free_slots_of_the_dead", self._shared | dead))
            taking = self._shared | _list(wanted) | {"most": self.most}
            statements.append(("take_slots", taking))
        if holds and now >= self._watch_at:
            self._watch_at = now + _WATCH_PAUSE
            statements.append(("watch_slots", self._shared))
        return statements

    def recount(self) -> Statement | None:
        """Make the statement to send first if the rows may differ from memory."""
        if not self.is_over:
            return None
        self.lease, self._lost = self._get_lease(), True
        return "count_slots", self._shared

    def recounted(self) -> None:
        """Note that the held slots are known again."""
        self._lost = False

    @property
    def seconds_left(self) -> float:
        """The seconds until the next check of whether others want a slot."""
        return max(0.0, self._watch_at - time.monotonic())


def note_asked(held: Holding, granted: int) -> None:
    """Note the slots that were granted to a holding that has asked for some."""
    now = time.monotonic()
    held.asked_at = now
    if granted:
        held.count += granted
        held.since, held.pause = now, _SHORTEST_PAUSE
    else:
        held.pause = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, held.pause * 2))


def note_released(held: Holding, count: int, *, needed: int) -> None:
    """Note that slots of a holding were released; jobs here may need some of them."""
    held.count -= count
    if held.wanted and held.count < needed:
        held.asked_at, held.pause = time.monotonic(), _YIELD_PAUSE
    held.wanted = 0


def _list(counts: Mapping[str, int]) -> dict[str, Any]:
    values: Sequence[str] = [*counts]
    return {"values": text_array(values), "counts": int_array(counts.values())}
