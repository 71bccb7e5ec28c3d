"""The result of a claim: its rows, made into jobs and lanes."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from jobs_lib.executor.claiming.rows import NEWER, SKIPPED, WINDOW, ClaimRow
from jobs_lib.executor.claiming.suspects import SUSPECT
from jobs_lib.executor.lane import ClaimedJob, Lane, find_head

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from jobs_lib.executor.claiming.cursor import Cursor
    from jobs_lib.executor.claiming.in_flight import Group, InFlight
    from jobs_lib.executor.lane import Item


class Found:
    """The result of one claim."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        """The items for the workers, in order."""
        self.jobs: list[ClaimedJob] = []
        """All jobs that were not in flight yet."""
        self.lanes: dict[Group, Lane] = {}
        self.ages: dict[int, tuple[bool, float]] = {}
        """Of jobs that run last only: whether delayed, and seconds since enqueued."""
        self.newer: dict[Group, int] = {}
        """For groups whose lane begins with a job that runs last only: the id of the
        next job of its type, outside the lane."""
        self.windows: list[tuple[str, int, int | None, int, bool]] = []
        """How far it has looked: origin, level of priority, the highest id, how many
        rows there were, and whether all of them were plain."""
        self.seen: list[ClaimRow] = []
        """The other rows, which it has passed over."""
        self.skipped: set[str] = set()
        """Origins at which it has not looked."""
        self.claimed = False
        """Whether any row was a job."""


def read_rows(
    rows: Iterable[tuple[Any, ...]],
    cursors: Mapping[str, Cursor],
    in_flight: InFlight,
    open_lane: Callable[[str, str | None], Lane],
    *,
    by_value: bool,
    gated: bool = False,
) -> Found:
    """Make jobs and lanes of the rows that are jobs; one pass, for each job.

    Args:
        rows: see :class:`ClaimRow`.
        cursors: of the owned origins; rows of other origins are left out.
        in_flight: the jobs in flight; the jobs found are added.
        open_lane: makes a lane for an origin and a group.
        by_value: whether the rows have the column ``value``.
        gated: whether each names the record that its job comes from.
    """
    found = Found()
    jobs, items, lanes, ages = found.jobs, found.items, found.lanes, found.ages
    flying, open_lanes = in_flight.jobs, in_flight.lanes
    lingering = in_flight.lingering
    free: dict[str, Lane] = {}
    for row in rows:
        # The columns of ClaimRow, which would cost another object for each job.
        (
            kind, origin, job_id, type_, group, failures, crashes, priority, payload,
            run_at, enqueued, headers, cut, delayed_or_placed, age, place,
        ) = row[:-1] if by_value else row  # fmt: skip
        if kind:
            if kind == WINDOW:
                # Its figures are in columns that only a job needs otherwise.
                found.windows.append((origin, priority, job_id, failures, bool(cut)))
            elif kind == SKIPPED:
                found.skipped.add(origin)
            elif kind == NEWER:
                found.newer[origin, group] = job_id
            else:
                found.seen.append(ClaimRow(*row))
            continue
        found.claimed = True
        if job_id in flying or origin not in cursors or job_id in lingering:
            continue
        if headers is not None and type(headers) is not dict:
            headers = None  # plain SQL can write any JSON
        if group is None:
            lane = free.get(origin)
            if lane is None:
                lane = free[origin] = open_lane(origin, None)
        else:
            key = (origin, group)
            lane = lanes.get(key)
            if lane is None:
                if key in open_lanes:
                    continue
                lane = lanes[key] = open_lane(origin, group)
                items.append(lane)
            # A suspect is alone in its lane, even if jobs follow it.
            lane.more = cut or crashes >= SUSPECT
        if gated:
            record, _, place = place.partition("(")
            place = f"({place}"
        job = ClaimedJob(
            job_id, type_, group, failures + crashes + 1, crashes, priority,
            payload, run_at, enqueued, headers, lane.origin, lane.installation,
            lane, place, delayed_or_placed or age is not None,
        )  # fmt: skip
        if by_value:
            job.value = row[-1]
        if gated:
            job.record = record
        jobs.append(job)
        flying[job_id] = job
        if group is None:
            items.append(job)
        else:
            lane.jobs.append(job)
            if age is not None:
                ages[job_id] = delayed_or_placed, age
    for lane in chain(free.values(), lanes.values()):
        # Only now: if the origin is released meanwhile, these must be in flight.
        if cursors[lane.origin].leaving:
            lane.dropped = True
    return found


def put_in_order(
    items: list[Item], asked: Collection[int], *, prioritized: bool
) -> tuple[list[Item], list[Item]]:
    """Items that go before all that wait for a worker, and the others, each in order.

    Args:
        items: in the claim's order.
        asked: ids that the claim has asked for.
        prioritized: whether there are jobs that are not of normal priority.
    """
    if asked:
        # They came before the jobs that the windows have found.
        ids = {*asked}
        items.sort(key=lambda item: not ((h := find_head(item)) and h.id in ids))
    if prioritized:
        items.sort(key=_rank)
    if not asked:
        return [], items
    urgent = [i for i in items if (h := find_head(i)) and h.crashes]
    return urgent, [i for i in items if not ((h := find_head(i)) and h.crashes)]


def _rank(item: Item) -> int:
    """High before normal before batch; a lane has the rank of its first job."""
    head = find_head(item)
    return -head.priority if head else 0
