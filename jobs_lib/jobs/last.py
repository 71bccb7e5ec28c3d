"""Run only the last of a group: supersede what waits before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from typing import TYPE_CHECKING

from jobs_lib.jobs.model import Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from jobs_lib.jobs.model import Lane


@dataclass(frozen=True, slots=True)
class Last:
    """How a type of which only the last job of a group runs waits for it."""

    debounce: float = 0.0
    """Seconds of quiet before the last one runs."""
    max_wait: float | None = None
    """Seconds after which one runs even if there was no quiet."""


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
