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

    from jobs_lib.jobs.model import Lane


@dataclass(frozen=True, slots=True)
class Last:
    """How a type of which only the last job of a group runs waits for it."""

    debounce: float = 0.0
    """Seconds of quiet before the last one runs."""
    max_wait: float | None = None
    """Seconds after which one runs even if there was no quiet."""


def keep_last(
    lane: Lane, last: Last, ages: Mapping[int, tuple[bool, float]]
) -> list[Outcome]:
    """Leave of the jobs at the lane's head only the newest; returns the others' ends.

    The lane starts once these are written: an older one must not run after it.

    Args:
        lane: its head is of a type that runs last only.
        last: how the type waits.
        ages: of its jobs by id: whether it still waits, and the seconds since enqueued.
    """
    name = lane.jobs[0].type
    pile = list(takewhile(lambda job: job.type == name, lane.jobs))
    head, newest = pile[0], pile[-1]
    behind = deque(list(lane.jobs)[len(pile) :])
    if lane.more and not behind:
        # The newest is not in sight: the next lane of the group begins with this one.
        lane.jobs, lane.last = deque(), newest.id - 1
        frees = None
    elif ages[newest.id][0] and not _waited_enough(ages[head.id][1], last):
        until = newest.run_at
        if last.max_wait is not None and until is not None:
            until = min(until, head.enqueued_at + timedelta(seconds=last.max_wait))
        lane.jobs, lane.failed = deque(), True
        return [Outcome(head, Result.SNOOZED, until=until)]
    else:
        behind.appendleft(newest)
        lane.jobs, frees = behind, lane
    ends = [Outcome(job, Result.SUPERSEDED) for job in pile[:-1]]
    if ends:
        ends[-1].frees = frees
    return ends


def _waited_enough(age: float, last: Last) -> bool:
    return last.max_wait is not None and age >= last.max_wait
