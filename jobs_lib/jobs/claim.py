"""Claim jobs of the owned origins: cursors, windows, lanes.

A claim changes no job row. Per origin there is a cursor, the highest id that was looked
at, kept here in memory only: a new owner starts at 0 and finds everything again,
because the rows themselves say what is left. The query ``claim`` says what lies behind
the cursor. This module makes the queries' parameters and reads their answers; it sends
nothing.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from jobs_lib import telemetry
from jobs_lib.db import int_array, text_array
from jobs_lib.jobs.ended import Ended
from jobs_lib.jobs.flight import Flight, Group
from jobs_lib.jobs.floors import Floors
from jobs_lib.jobs.last import Last, Piles, keep_last
from jobs_lib.jobs.model import Job, Lane, Outcome, Result
from jobs_lib.jobs.position import WIDEST, Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from jobs_lib.backoff import Retry
    from jobs_lib.jobs.type import JobType

Item: TypeAlias = Job | Lane
"""What a worker takes: a job without a group, or a group's lane."""
# The kinds of the rows that the query `claim` returns besides jobs.
_WINDOW, _PASSED, _UNKNOWN = 1, 2, 3

_LANE = 8
_LONGEST_LANE = 1_000
_JUMP = 50_000
_FEW_GROUPS = 50
_BATCH_SHARE = 16
_CRASHES = 2
_MOST_PER_ROW = 16.0


class Claimer:
    """The owner's side of the claim; used by one thread."""

    def __init__(
        self,
        owner: UUID,
        installation: UUID,
        types: Mapping[str, JobType[Any]],
        first: int = 0,
        step: int = 1,
        alone: threading.Lock | None = None,
    ) -> None:
        """Prepare to claim.

        Args:
            owner: the process, as it owns origins.
            installation: the database's identity.
            types: the handlers, by the name of their type.
            first: numbers of claims are this one,
            step: and every so many further, since an owner may have several claimers.
            alone: held while a suspect is in flight, by one of those claimers.
        """
        self.owner = owner
        self.first = first
        self.step = step
        self.ended = Ended()
        """Where what was claimed ends."""
        self._alone = alone or threading.Lock()
        self.flight = Flight()
        self.floors = Floors()
        self.positions: dict[str, Position] = {}
        self.extra: dict[int, str] = {}
        """Promoted and late rows, for the next claim: id and origin."""
        self.given_back: list[Job] = []
        """Claimed, but they will not run under this claim."""
        self.prioritized = False
        """Whether there are jobs that are not of normal priority."""
        self._installation = installation
        self._types = types
        self._known = sorted(types)
        self._last = {
            name: Last(t.debounce, t.max_wait)
            for name, t in types.items()
            if t.last_only
        }
        self._paused: dict[str, frozenset[str]] = {}
        self._order: deque[str] = deque()
        self._seq = first
        self._suspects: dict[int, str] = {}
        self._suspect = 0
        self._asked: dict[tuple[str, int], int] = {}
        self._following: dict[Group, int] = {}
        """Groups that are asked for by name, behind an id; 0 is from their floor on."""
        self._tried: list[int] = []
        self._per_row = 1.0
        """Jobs that each row of a window leads to: groups come in lanes."""
        self._unknown: dict[tuple[str, str], int] = {}
        self._piles = Piles()

    # What is owned

    def add(self, origins: Mapping[str, int]) -> None:
        """Start to claim from origins that were taken over, at their epochs."""
        for origin, epoch in origins.items():
            self.positions[origin] = Position(epoch)
        self._order = deque(self.positions)

    def retire(self, origins: Iterable[str]) -> list[Job]:
        """Claim nothing more from origins; returns their jobs in flight, now dropped.

        What of them is running can still be settled, until :meth:`drop`.
        """
        leaving = {origin for origin in origins if origin in self.positions}
        for origin in leaving:
            self.positions[origin].leaving = True
        jobs = [j for j in self.flight.jobs.values() if j.lane.origin in leaving]
        for job in jobs:
            job.lane.dropped = True
        return jobs

    def drop(self, origins: Iterable[str]) -> list[Job]:
        """Forget origins; returns what was still in flight of them."""
        gone = frozenset(origins)
        for origin in gone:
            self.positions.pop(origin, None)
        self._order = deque(self.positions)
        self.extra = {i: o for i, o in self.extra.items() if o not in gone}
        self._suspects = {i: o for i, o in self._suspects.items() if o not in gone}
        self._piles.leave(gone)
        self.floors.leave(gone)
        return self.flight.leave(gone)

    @property
    def epochs(self) -> dict[str, int]:
        """The owned origins and their epochs."""
        return {origin: position.epoch for origin, position in self.positions.items()}

    @property
    def types(self) -> list[str]:
        """The types that may run now."""
        paused = self._paused.get("type", frozenset())
        return [name for name in self._known if name not in paused]

    def active(self) -> dict[str, Position]:
        """The origins that may be claimed from now."""
        paused = self._paused.get("origin", frozenset())
        return {
            origin: position
            for origin, position in self.positions.items()
            if not position.leaving and origin not in paused
        }

    def pause(self, paused: dict[str, frozenset[str]]) -> None:
        """Run nothing of these types, origins and groups any more, but all others."""
        if paused == self._paused:
            return
        resumed = any(
            old - paused.get(kind, set()) for kind, old in self._paused.items()
        )
        self._paused = paused
        if resumed:
            # What was passed over lies behind the cursors.
            for position in self.positions.values():
                position.rewind()

    # What there is to do

    def hint(self, origin: str) -> None:
        """Somebody says that there is something new in this origin; "" is in any."""
        if position := self.positions.get(origin):
            position.deep = True
        elif not origin:
            for position in self.positions.values():
                position.deep = True

    def prepare(self, room: int) -> tuple[str, dict[str, Any]] | None:
        """A query that claims about ``room`` jobs, and its parameters.

        None when there is nothing to look at.
        """
        active = self.active()
        self.extra |= self.flight.late
        self.flight.late.clear()
        deep = [o for o in self._order if o in active and active[o].deep][:room]
        self._order.rotate(-len(deep))
        behind = self._choose_behind(active, room)
        extra = [
            (origin, job_id)
            for job_id, origin in islice(self.extra.items(), max(room, 1))
            if job_id not in self.flight.jobs and origin in active
        ]
        suspect = self._choose_suspect()
        if suspect:
            extra.append((self._suspects[suspect], suspect))
        if room <= 0 or not (deep or behind or extra):
            return None
        self._seq += self.step
        if len(deep) == 1 and not (behind or extra or self.prioritized):
            position = self.positions[deep[0]]
            if position.plain and position.growth == 1:
                return "claim_plain", self._prepare_plain(deep[0], position, room)
        self._following = {(o, g): at for o, g, at in behind}
        self._tried = [i for _, i in extra]
        touched = sorted({*deep, *(o for o, _ in extra), *(o for o, _, _ in behind)})
        # Groups that are asked for anyway need no look for their heads.
        busy = self.flight.lanes.keys() | self._following
        floors = self.floors.choose(touched, busy)
        parameters = {
            "owner": self.owner,
            "seq": self._seq,
            "types": self.types,
            "known": self._known,
            "last_types": list(self._last),
            "suspect": suspect,
            "room": room,
            "lane": max(2, min(room, _LONGEST_LANE)),
            "origins": text_array(touched),
            "epochs": int_array(self.positions[o].epoch for o in touched),
            **self._size_windows(deep, max(1, room - _LANE * len(behind))),
            "extra_origins": text_array([o for o, _ in extra]),
            "extra_ids": int_array(i for _, i in extra),
            "busy_origins": text_array([o for o, _ in busy]),
            "busy_groups": text_array([g for _, g in busy]),
            "floor_origins": text_array([o for o, _, _ in floors]),
            "floor_groups": text_array([g for _, g, _ in floors]),
            "floor_ids": int_array(floor for _, _, floor in floors),
            "paused_groups": text_array(list(self._paused.get("group", ()))),
            "next_origins": text_array([o for o, _, _ in behind]),
            "next_groups": text_array([g for _, g, _ in behind]),
            "next_ids": int_array(
                at or self.floors.find((o, g)) for o, g, at in behind
            ),
            "next_piles": [(o, g) in self._piles for o, g, _ in behind],
        }
        return "claim", parameters

    def _prepare_plain(
        self, origin: str, position: Position, room: int
    ) -> dict[str, Any]:
        size = max(2, room)
        position.deep = False
        self._asked = {(origin, 0): size}
        self._following, self._tried = {}, []
        return {
            "owner": self.owner,
            "seq": self._seq,
            "types": self.types,
            "origin": origin,
            "epoch": position.epoch,
            "cursor": position.cursor,
            "size": size,
        }

    def _choose_behind(
        self, active: Mapping[str, Position], room: int
    ) -> list[tuple[str, str, int]]:
        paused = self._paused.get("group", frozenset())
        found = (
            (origin, group, at)
            for (origin, group), at in self.flight.behind.items()
            if origin in active and group not in paused
        )
        # Few and long lanes cost least; the others come with the next claim.
        return list(islice(found, max(_LANE, room // _LANE)))

    def _choose_suspect(self) -> int:
        if self._suspect in self.flight.jobs:
            return 0
        if self._suspect:
            self._suspect = 0
            self._alone.release()
        if self._suspects and self._alone.acquire(blocking=False):
            self._suspect = next(iter(self._suspects))
        return self._suspect

    def _size_windows(self, deep: list[str], room: int) -> dict[str, Any]:
        share = math.ceil(room / max(1, len(deep)))
        size = max(2, math.ceil(share / self._per_row))
        plain = [o for o in deep if self.positions[o].growth == 1]
        wide = [o for o in deep if self.positions[o].growth > 1]
        widths = [min(WIDEST, size * self.positions[o].growth) for o in wide]
        for origin in deep:
            self.positions[origin].deep = False
        self._asked = dict.fromkeys(((o, 0) for o in plain), size)
        self._asked |= {(o, 0): width for o, width in zip(wide, widths, strict=True)}
        # However high the load of the others is, one in sixteen is of the lowest.
        few = share // _BATCH_SHARE or int(self._seq % (_BATCH_SHARE // share) == 0)
        levels = [(1, share), (-1, few)] if self.prioritized else []
        leveled = [(o, n, s) for o in deep for n, s in levels if s]
        self._asked |= {(o, level): size for o, level, size in leveled}
        return {
            "window_origins": text_array(plain),
            "cursors": int_array(self.positions[o].cursor for o in plain),
            "sizes": int_array(size for _ in plain),
            "wide_origins": text_array(wide),
            "wide_cursors": int_array(self.positions[o].cursor for o in wide),
            "wide_sizes": int_array(widths),
            "caps": int_array(share for _ in wide),
            "level_origins": text_array([o for o, _, _ in leveled]),
            "levels": int_array(level for _, level, _ in leveled),
            "level_cursors": int_array(
                self.positions[o].levels[level] for o, level, _ in leveled
            ),
            "level_sizes": int_array(size for _, _, size in leveled),
        }

    # What was found

    def read(self, rows: Iterable[tuple[Any, ...]]) -> tuple[list[Item], list[Outcome]]:
        """What the claim took, now that it is known that it has committed.

        Returns what is for the workers, in order, and what is settled without a run.
        """
        flying, open_lanes = self.flight.jobs, self.flight.lanes
        for job_id in self._tried:
            self.extra.pop(job_id, None)
        for key in self._following:
            self.flight.behind.pop(key, None)
        self._suspects.pop(self._suspect, None)
        free: dict[str, Lane] = {}
        lanes: dict[tuple[str, str], Lane] = {}
        items: list[Item] = []
        jobs: list[Job] = []
        ages: dict[int, tuple[bool, float]] = {}
        looked: list[tuple[Any, ...]] = []
        count = 0
        for row in rows:
            count += 1
            kind, origin, job_id, type_, group = row[:5]
            if kind:
                looked.append(row)
                continue
            if job_id in flying or origin not in self.positions:
                continue
            if group is None:
                lane = free.get(origin)
                if lane is None:
                    lane = free[origin] = self._open_lane(origin, None)
            else:
                key = (origin, group)
                lane = lanes.get(key)
                if lane is None:
                    if key in open_lanes:
                        continue
                    lane = lanes[key] = self._open_lane(origin, group)
                    items.append(lane)
                # A suspect is alone in its lane, whatever stands behind it.
                lane.more = row[12] or row[6] > 0
            job = Job(
                lane, job_id, type_, group, row[5] + row[6] + 1, row[6], row[7], row[8],
                row[9], row[10], row[11], row[15],
            )  # fmt: skip
            jobs.append(job)
            flying[job_id] = job
            if group is None:
                items.append(job)
            else:
                lane.jobs.append(job)
                if row[14] is not None:
                    ages[job_id] = row[13], row[14]
        open_lanes.update(lanes)
        if len(looked) < count:
            # Even if all were in flight already: the claim's row must go some day.
            self.flight.count(self._seq, len(jobs))
        # What was asked for by its group says nothing of the window.
        taken = {
            (job.lane.origin, job.priority)
            for job in jobs
            if (job.lane.origin, job.group) not in self._following
        }
        for row in looked:
            self._note(row, taken)
        for key, lane in lanes.items():
            # Behind any other id the claim has not looked for the head of the group.
            if not self._following.get(key):
                low = self.positions[key[0]].low
                self.floors.note(key, lane.jobs[0].id, len(lane.jobs), low)
        cut = sum(lane.more for lane in lanes.values())
        self._size_lanes(len(lanes), cut)
        outcomes = [
            o for lane in lanes.values() for o in self._settle_early(lane, ages)
        ]
        outcomes += [
            explain_crashes(job, self._types[job.type].retry)
            for job in jobs
            if job.crashes >= _CRASHES and job.group is None
        ]
        if outcomes:
            held = {id(o.frees) for o in outcomes} | {id(o.job) for o in outcomes}
            items = [item for item in items if id(item) not in held]
        if self.prioritized:
            items.sort(key=_rank)
        if jobs:
            telemetry.emit("jobs.claimed", count=len(jobs))
        return items, outcomes

    def _open_lane(self, origin: str, group: str | None) -> Lane:
        epoch = self.positions[origin].epoch
        return Lane(origin, epoch, group, self._seq, self._installation, self.ended)

    def _note(self, row: tuple[Any, ...], taken: set[tuple[str, int]]) -> None:
        kind, origin, job_id, type_, group, count, _, level = row[:8]
        position = self.positions.get(origin)
        if position is None:
            return
        if kind == _WINDOW:
            full = count >= self._asked[origin, level]
            if level:
                position.levels[level] = max(position.levels[level], job_id)
            else:
                position.cursor = max(position.cursor, job_id or 0)
                position.plain = row[12]
                # What is not plain stops a plain claim: another one takes it.
                full = full or position.growth > 1 or not job_id or not position.plain
                barren = full and (origin, 0) not in taken
                position.growth = min(position.growth * 4, WIDEST) if barren else 1
            position.deep |= full
        elif kind == _PASSED:
            if lane := self.flight.lanes.get((origin, group)):
                flying = job_id in self.flight.jobs
                # A lane of this same claim has read what there is behind its rows.
                lane.more |= not (flying and lane.seq == self._seq)
                if job_id < lane.last and not flying:
                    lane.late = job_id
        elif kind == _UNKNOWN:
            self._report_unknown(type_, origin, count)
        else:
            self._suspects[job_id] = origin

    def _size_lanes(self, lanes: int, cut: int) -> None:
        """Fewer windows' rows and longer lanes, while groups have more to give."""
        if cut * 2 > lanes > 8:
            self._per_row = min(_MOST_PER_ROW, self._per_row * 2)
        elif not cut:
            self._per_row = max(1.0, self._per_row / 2)

    def _settle_early(
        self, lane: Lane, ages: Mapping[int, tuple[bool, float]]
    ) -> list[Outcome]:
        """What of a lane is settled before the rest of it may start."""
        head = lane.jobs[0]
        before = list(lane.jobs)
        if head.crashes >= _CRASHES:
            ends = [explain_crashes(head, self._types[head.type].retry)]
            lane.jobs.clear()
            lane.failed = ends[0].result is Result.RETRIED
        # A suspect is alone in its lane, so whether it is the last is not to be seen.
        elif (last := self._last.get(head.type)) and not head.crashes:
            key = lane.origin, str(lane.group)
            since = self._piles.take(key, head)
            ends = keep_last(lane, last, ages, since)
            if not lane.failed and not lane.jobs:
                # The newest was not in sight.
                self._piles.keep(key, lane.last + 1, since)
            elif not lane.jobs and since < head.enqueued_at:
                self._piles.keep(key, head.id, since)
        else:
            return []
        kept = {id(job) for job in lane.jobs} | {id(end.job) for end in ends}
        for job in before:
            if id(job) not in kept:
                self.give_back(job)
        if ends:
            ends[-1].frees = lane
        return ends

    def give_back(self, job: Job) -> None:
        """A claimed job will not run now: take it out of its claim."""
        self.flight.land(job)
        self.given_back.append(job)

    def take_back(self, item: Item) -> None:
        """What no worker has begun: it is claimed again when there is room."""
        head = item if isinstance(item, Job) else item.jobs[0]
        self.extra[head.id] = head.lane.origin
        if isinstance(item, Job):
            self.give_back(item)
            return
        for job in item.jobs:
            self.give_back(job)
        item.jobs.clear()
        item.more = False
        self.flight.end_lane(item)

    def shorten(self, lane: Lane) -> None:
        """Give back what waits behind a lane's running job."""
        while True:
            try:
                job = lane.jobs.pop()
            except IndexError:
                return
            lane.more, lane.last = True, job.id - 1
            self.give_back(job)

    def _report_unknown(self, type_: str, origin: str, count: int) -> None:
        if (type_, origin) not in self._unknown:
            telemetry.emit("jobs.unknown", type=type_, origin=origin, count=count)
        self._unknown[type_, origin] = self._unknown.get((type_, origin), 0) + count

    # Past a busy group

    def prepare_jump(self) -> dict[str, Any] | None:
        """The parameters of the query ``jump``, where an origin is stuck in a group."""
        for origin, position in self.active().items():
            if position.growth >= WIDEST:
                busy = self.flight.lanes.keys() | self.flight.behind.keys()
                groups = [g for o, g in busy if o == origin]
                if groups and len(groups) < _FEW_GROUPS:
                    return {
                        "origin": origin,
                        "cursor": position.cursor,
                        "groups": text_array(groups),
                        "limit": _JUMP,
                    }
        return None

    def read_jump(
        self, asked: Mapping[str, Any], row: tuple[int | None, int | None, int]
    ) -> None:
        """Go on behind the rows of the busy groups; their lanes reach those."""
        position = self.positions.get(asked["origin"])
        found, furthest, _ = row
        if position is None or furthest is None:
            return
        position.cursor = max(position.cursor, furthest if found is None else found - 1)
        position.growth = WIDEST if found is None else 1
        position.deep = True
        for (origin, _), lane in self.flight.lanes.items():
            if origin == asked["origin"]:
                lane.more = True


def explain_crashes(job: Job, policy: Retry) -> Outcome:
    """What becomes of a job whose process died twice: by now it is the likely cause."""
    error = f"the process died {job.crashes} times while this job may have been running"
    failed = job.attempt - 1
    if policy.exhausted(failed):
        return Outcome(job, Result.DISCARDED, error, ran=False)
    return Outcome(job, Result.RETRIED, error, policy.delay(failed), ran=False)


def _rank(item: Item) -> int:
    """High before normal before batch; a lane ranks by its head."""
    job = item if isinstance(item, Job) else item.jobs[0] if item.jobs else None
    return -job.priority if job else 0
