"""Run only the last of a group: supersede what waits before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from typing import TYPE_CHECKING

from jobs_lib.jobs.model import Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from datetime import datetime

    from jobs_lib.jobs.flight import Group
    from jobs_lib.jobs.model import Job, Lane

_MOST = 10_000


@dataclass(frozen=True, slots=True)
class Last:
    """How a type of which only the last job of a group runs waits for it."""

    debounce: float = 0.0
    """Seconds of quiet before the last one runs."""
    max_wait: float | None = None
    """Seconds after which one runs even if there was no quiet."""


class Piles:
    """Groups of which the oldest job is superseded and the last one still waits."""

    def __init__(self) -> None:
        self._since: dict[Group, tuple[int, datetime]] = {}
        """The job that is waited for, and when the oldest was enqueued."""

    def __contains__(self, group: Group) -> bool:
        return group in self._since

    def __len__(self) -> int:
        return len(self._since)

    def take(self, group: Group, head: Job) -> datetime:
        """When the oldest of the pile was enqueued that ``head`` stands for."""
        awaited, since = self._since.pop(group, (0, head.enqueued_at))
        # Else the one that was waited for has ended without us, such as by a cancel.
        return since if head.id <= awaited else head.enqueued_at

    def keep(self, group: Group, awaited: int, since: datetime) -> None:
        """The group waits for a job; the oldest of its pile was enqueued ``since``."""
        self._since.pop(group, None)
        self._since[group] = awaited, since
        # Whoever is cancelled while it waits is never asked for again. A pile that is
        # forgotten too early waits from the last one's own enqueue on.
        if len(self._since) > _MOST:
            del self._since[next(iter(self._since))]

    def leave(self, origins: Container[str]) -> None:
        """Forget those of origins."""
        self._since = {k: v for k, v in self._since.items() if k[0] not in origins}


def keep_last(
    lane: Lane,
    last: Last,
    ages: Mapping[int, tuple[bool, float]],
    since: datetime,
) -> list[Outcome]:
    """Leave of the jobs at the lane's head only the newest; returns the others' ends.

    The lane starts once these are written: an older one must not run after it.

    Args:
        lane: its head is of a type that runs last only.
        last: how the type waits.
        ages: of its jobs by id: whether it still waits, and the seconds since enqueued.
        since: when the oldest was enqueued, which may be superseded by now.
    """
    name = lane.jobs[0].type
    pile = list(takewhile(lambda job: job.type == name, lane.jobs))
    head, newest = pile[0], pile[-1]
    behind = deque(list(lane.jobs)[len(pile) :])
    if lane.more and not behind:
        # The newest is not in sight: the next lane of the group begins with this one.
        lane.jobs, lane.last = deque(), newest.id - 1
        frees = None
    elif _is_early(ages[newest.id], last) and not _waited_enough(
        ages[head.id][1] + (head.enqueued_at - since).total_seconds(), last
    ):
        until = newest.enqueued_at + timedelta(seconds=last.debounce)
        if newest.run_at is not None:
            until = max(until, newest.run_at)
        if last.max_wait is not None:
            until = min(until, since + timedelta(seconds=last.max_wait))
        lane.jobs, lane.failed = deque(), True
        return [Outcome(head, Result.SNOOZED, until=until)]
    else:
        behind.appendleft(newest)
        lane.jobs, frees = behind, lane
    ends = [Outcome(job, Result.SUPERSEDED) for job in pile[:-1]]
    if ends:
        ends[-1].frees = frees
    return ends


def _is_early(newest: tuple[bool, float], last: Last) -> bool:
    waits, age = newest
    return waits or age < last.debounce


def _waited_enough(age: float, last: Last) -> bool:
    return last.max_wait is not None and age >= last.max_wait
