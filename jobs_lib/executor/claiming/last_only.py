"""Run only the last job of a group: it supersedes those that wait before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from typing import TYPE_CHECKING

from jobs_lib.executor.lane import Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from datetime import datetime

    from jobs_lib.executor.claiming.in_flight import Group
    from jobs_lib.executor.lane import ClaimedJob, Lane

_MOST = 10_000


@dataclass(frozen=True, slots=True)
class LastOnly:
    """How a type waits for the last job of a group, if only that one runs."""

    debounce: float = 0.0
    """Seconds of quiet before the last one runs."""
    max_wait: float | None = None
    """Seconds after which one runs even if there was no quiet."""


class Superseding:
    """Groups that wait for a job that runs last only, by its type."""

    def __init__(self) -> None:
        self._since: dict[Group, dict[str, tuple[int, datetime]]] = {}
        """The job that the group waits for, and when the oldest was enqueued."""

    def __contains__(self, group: Group) -> bool:
        return group in self._since

    def __len__(self) -> int:
        return len(self._since)

    def take(self, group: Group, head: ClaimedJob) -> datetime:
        """When the oldest of the jobs that ``head`` replaces was enqueued."""
        types = self._since.get(group, {})
        awaited, since = types.pop(head.type, (0, head.enqueued_at))
        if not types:
            self._since.pop(group, None)
        # Otherwise the awaited job ended without us, for example by a cancel.
        return since if head.id <= awaited else head.enqueued_at

    def keep(self, group: Group, type_: str, awaited: int, since: datetime) -> None:
        """The group waits for a job; the oldest it replaces was enqueued ``since``."""
        types = self._since.pop(group, {})
        self._since[group] = types | {type_: (awaited, since)}
        # A job cancelled while it waits is never asked for again, so limit the memory.
        # A group forgotten too early waits from the last job's own enqueue on.
        if len(self._since) > _MOST:
            del self._since[next(iter(self._since))]

    def release(self, origins: Container[str]) -> None:
        """Forget the groups of origins."""
        self._since = {k: v for k, v in self._since.items() if k[0] not in origins}


def supersede(
    lane: Lane,
    types: Mapping[str, LastOnly],
    ages: Mapping[int, tuple[bool, float]],
    superseding: Superseding,
    newer: int | None,
) -> list[Outcome]:
    """Leave in the lane the jobs that may start now; return the outcomes of others.

    A job that runs last only starts only at the head of a lane, so that the claim has
    seen all jobs until then. Each one with a newer one of its type behind it ends, even
    if other jobs are between. The lane starts once that is written, because an older
    job must not run after it.

    Args:
        lane: of a group.
        types: those that run last only, and how each waits.
        ages: of their jobs by id: whether it still waits, and seconds since enqueued.
        superseding: what groups wait for.
        newer: the next job outside the lane with the same type as the lane's head.
    """
    key = lane.origin, str(lane.group)
    jobs, head = [*lane.jobs], lane.jobs[0]
    seen: dict[str, list[ClaimedJob]] = {}
    for job in jobs:
        if job.type in types:
            seen.setdefault(job.type, []).append(job)
    since = {name: superseding.take(key, pile[0]) for name, pile in seen.items()}
    for name, pile in seen.items():
        superseding.keep(key, name, pile[-1].id, since[name])
    ends: list[Outcome] = []
    starts: ClaimedJob | None = None
    if last := types.get(head.type):
        pile = seen[head.type]
        if newer is not None:
            superseding.keep(key, head.type, newer, since[head.type])
            ends.append(_replace(pile[-1], newer))
        elif jobs[len(pile) - 1] is pile[-1]:
            starts = pile[-1]
            superseding.take(key, starts)
            if _must_wait(pile, last, ages, since[head.type]):
                lane.jobs, lane.failed = deque(), True
                return _put_off(pile, last, ages, since[head.type], superseding)
        for name, same in seen.items():
            by = newer if newer and name == head.type else same[-1].id
            ends += [_replace(job, by) for job in same[:-1]]
    ended = {end.job.id for end in ends}
    left = [job for job in jobs if job.id not in ended]
    going = list(takewhile(lambda j: j is starts or j.type not in types, left))
    if len(going) < len(left):
        lane.more, lane.last = True, left[len(going)].id - 1
    elif ends:
        lane.last = jobs[-1].id
    lane.jobs = deque(going)
    return ends


def _must_wait(
    pile: list[ClaimedJob],
    last: LastOnly,
    ages: Mapping[int, tuple[bool, float]],
    since: datetime,
) -> bool:
    head, newest = pile[0], pile[-1]
    waits, age = ages[newest.id]
    if waits and newest is head:
        return True
    waited = ages[head.id][1] + (head.enqueued_at - since).total_seconds()
    enough = last.max_wait is not None and waited >= last.max_wait
    return (waits or age < last.debounce) and not enough


def _put_off(
    pile: list[ClaimedJob],
    last: LastOnly,
    ages: Mapping[int, tuple[bool, float]],
    since: datetime,
    superseding: Superseding,
) -> list[Outcome]:
    """The newest must wait: one of the jobs blocks the group until then."""
    head, newest = pile[0], pile[-1]
    waits = ages[head.id][0]
    if waits and newest is head:
        return []
    until = newest.enqueued_at + timedelta(seconds=last.debounce)
    if newest.run_at is not None:
        until = max(until, newest.run_at)
    if last.max_wait is not None:
        until = min(until, since + timedelta(seconds=last.max_wait))
    # A failed head gives way now, or each newer job would ask it to do so.
    older = pile[:-1] if waits and head.attempt > 1 else []
    holds = newest if older else head
    if since < holds.enqueued_at:
        superseding.keep((head.origin, str(head.group)), head.type, holds.id, since)
    ends = [_replace(job, newest.id) for job in older]
    return [*ends, Outcome(holds, Result.SNOOZED, until=until)]


def _replace(job: ClaimedJob, by: int) -> Outcome:
    return Outcome(job, Result.SUPERSEDED, by=by)
