"""Claim jobs of the owned origins: cursors, windows, lanes.

A claim changes no job row. Per origin there is a cursor, the highest id that was looked
at, kept here in memory only: a new owner starts at 0 and finds everything again,
because the rows themselves say what is left. The query ``claim`` says what lies behind
the cursor. This module makes the queries' parameters and reads their answers; it sends
nothing.
"""

from __future__ import annotations

import time
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias

from jobs_lib import telemetry
from jobs_lib.executor.claiming.group_starts import GroupStarts
from jobs_lib.executor.claiming.in_flight import Group, InFlight
from jobs_lib.executor.claiming.last_only import LastOnly, Superseding, supersede
from jobs_lib.executor.claiming.passed import Passed
from jobs_lib.executor.claiming.suspects import (
    GUILTY,
    SUSPECT,
    Suspects,
    explain_crashes,
)
from jobs_lib.executor.claiming.windows import Windows
from jobs_lib.executor.lane import ClaimedJob, Finished, Lane, Outcome, Result
from jobs_lib.executor.section import Section
from jobs_lib.ownership.lease import UNLIMITED, Lease
from jobs_lib.ownership.role import EXECUTE
from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from uuid import UUID

    from jobs_lib.executor.claiming.cursor import Cursor
    from jobs_lib.jobs.type import JobType

Item: TypeAlias = ClaimedJob | Lane
"""What a worker takes: a job without a group, or a group's lane."""
# The kinds of the rows that the query `claim` returns besides jobs.
_WINDOW, _PASSED, _UNKNOWN, _SKIPPED, _NEWER = 1, 2, 3, 5, 6
_FOREIGN, _ENDS, _BEHIND, _FULL = 7, 8, 9, 10
SKIP_PAUSE = 0.02
"""Seconds until an origin is asked again that somebody had locked, such as a cancel."""

_LANE = 8
_LONGEST_LANE = 1_000
_PATIENCE = 4
"""Of so many claims one looks behind the cursors, whatever is asked for by id."""


class _Found:
    """What one claim has found."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        """For the workers, in order."""
        self.jobs: list[ClaimedJob] = []
        """All that were not in flight yet."""
        self.lanes: dict[Group, Lane] = {}
        self.ages: dict[int, tuple[bool, float]] = {}
        """Of what runs last only: is it delayed, and seconds since its enqueue."""
        self.newer: dict[Group, int] = {}
        """Groups whose lane begins with what runs last only: the id of the next one of
        its type, out of sight."""
        self.looks: list[tuple[Any, ...]] = []
        """The other rows: where it has looked."""
        self.skipped: set[str] = set()
        """Origins at which it has not looked."""
        self.claimed = False
        """Whether any row was a job."""


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
        lease: Callable[[], Lease] = lambda: UNLIMITED,
        section: Section | None = None,
        role: str = EXECUTE,
        foreign: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """Prepare to claim.

        Args:
            owner: the process, as it owns origins.
            installation: the database's identity.
            types: the handlers, by the name of their type.
            first: numbers of claims are this one,
            step: and every so many further, since an owner may have several claimers.
            alone: held while a suspect is in flight, by one of those claimers.
            lease: tells the owner's lease that holds now.
            section: the types to claim; all by default.
            role: in which the owner has its origins.
            foreign: tells the types that other apps know.
        """
        self.section = section or Section(frozenset(types))
        self.owner = owner
        self.role = role
        self.first = first
        self.step = step
        self.server = 0
        """The server that is asked; 0 is unknown. See the query ``read_server``."""
        self.finished = Finished()
        """Where what was claimed ends."""
        self.in_flight = InFlight()
        self.group_starts = GroupStarts()
        self.windows = Windows()
        self.cursors = self.windows.cursors
        self.extra: dict[int, str] = {}
        """Rows to claim by id, and their origin: promoted, late, found by a jump."""
        self.hurried: dict[int, str] = {}
        """The same, before all others: they had begun when their process died."""
        self.urgent: list[Item] = []
        """What the last claim has found of those that were hurried."""
        self.given_back: list[ClaimedJob] = []
        """Claimed, but they will not run under this claim."""
        self.passed = Passed()
        """Passed over for their value alone."""
        self.shared: list[tuple[str, str, str | None]] = []
        """Groups that are other sections' business: origin, group, and the type with
        which they go on; None where they may just have more behind what is in flight.
        """
        self._installation = installation
        self._get_lease = lease
        self._lease = lease()
        self._types = types
        self._every = sorted(types)
        self._get_foreign = foreign
        self._foreign: frozenset[str] = frozenset()
        self._known = sorted(self.section.types)
        self._last = {
            name: LastOnly(t.debounce, t.max_wait)
            for name, t in types.items()
            if t.last_only and name in self.section.types
        }
        self._values: dict[str, Any] = {
            "others": sorted(self.section.others),
            "field": self.section.parameter,
        }
        """The parameters of queries that say what the section leaves alone."""
        self._kind = "_limited" if self.section.parameter else ""
        """Of the queries: see ``_read_queries``."""
        self._refilled: dict[int, str] = {}
        """Jobs that are asked for since fewer of their value wait now."""
        self._paused: dict[str, frozenset[str]] = {}
        self._resumes: int | None = None
        self._seq = first
        self._suspects = Suspects(alone)
        self._following: dict[Group, int] = {}
        """Groups that are asked for by name, behind an id; 0 is from their floor on."""
        self._tried: list[int] = []
        self._left_none = 0
        """So many claims in a row had no room for what lies behind the cursors."""
        self._skipped: dict[str, float] = {}
        """Origins that the last claims skipped, and when they may be asked again."""
        self._unknown: dict[tuple[str, str], int] = {}
        self._superseding = Superseding()

    # What is owned

    def take(self, origins: Mapping[str, int]) -> None:
        """Start to claim from origins that were taken over, at their epochs."""
        self.windows.take(origins)

    def stop_claiming(self, origins: Iterable[str]) -> list[ClaimedJob]:
        """Claim nothing more from origins; returns their jobs in flight, now dropped.

        What of them is running can still be settled, until :meth:`release`.
        """
        leaving = frozenset(origins)
        for origin in leaving:
            if cursor := self.cursors.get(origin):
                cursor.leaving = True
        # A copy: this is called by other threads, too.
        flying = self.in_flight.jobs.copy().values()
        jobs = [job for job in flying if job.lane.origin in leaving]
        for job in jobs:
            job.lane.dropped = True
        return jobs

    def release(self, origins: Iterable[str]) -> list[ClaimedJob]:
        """Forget origins; returns what was still in flight of them."""
        gone = frozenset(origins)
        self.windows.release(gone)
        self.extra = {i: o for i, o in self.extra.items() if o not in gone}
        self.hurried = {i: o for i, o in self.hurried.items() if o not in gone}
        self._suspects.release(gone)
        self._superseding.release(gone)
        self.group_starts.release(gone)
        self.passed.release(gone)
        return self.in_flight.release(gone)

    @property
    def epochs(self) -> dict[str, int]:
        """The owned origins and their epochs."""
        return {origin: cursor.epoch for origin, cursor in self.cursors.items()}

    @property
    def lasts(self) -> dict[str, Any]:
        """The parameter of queries that says which types run last only."""
        return {"last_types": list(self._last)}

    @property
    def types(self) -> list[str]:
        """The types that may run now."""
        paused = self._paused.get("type", frozenset())
        return [name for name in self._known if name not in paused]

    def active(self) -> dict[str, Cursor]:
        """The origins that may be claimed from now."""
        paused = self._paused.get("origin", frozenset())
        return {
            origin: cursor
            for origin, cursor in self.cursors.items()
            if not cursor.leaving and origin not in paused
        }

    def pause(self, paused: dict[str, frozenset[str]], resumes: int = 0) -> None:
        """Run nothing of these types and origins any more, but all others.

        Paused groups are left out by the claims themselves.

        Args:
            paused: names by kind, ``type`` or ``origin``.
            resumes: how often pauses have ended, of groups, too. With another number
                than before, what was passed over is looked at again.
        """
        self._paused = paused
        if self._resumes not in (None, resumes):
            self._rewind()
        self._resumes = resumes

    def doubt(self) -> None:
        """Forget what is known of the rows: the last commits may be lost."""
        self.windows.doubt()
        self.passed.clear()
        self.group_starts.clear()
        self.extra.clear()
        self.hurried.clear()
        self.in_flight.doubt()
        self._suspects.clear()
        self._following, self._tried = {}, []
        self._refilled.clear()

    # What there is to do

    @property
    def is_barred(self) -> bool:
        """Whether the owner may not begin anything now, so that claims are in vain."""
        return self._get_lease().is_over()

    def prepare(self, room: int, hurried: int = 0) -> tuple[str, dict[str, Any]] | None:
        """A query that claims about ``room`` jobs, and its parameters.

        None when there is nothing to look at. There may be room for more of those that
        are to be hurried.
        """
        # Now, and not when the answer is there: the process may stand still meanwhile.
        self._lease = self._get_lease()
        self._note_foreign()
        active = self._askable()
        self._add_extra(self.in_flight.late)
        self.in_flight.late.clear()
        if self.passed or self.passed.is_overflown:
            self._refill(active)
        behind = self._choose_behind(active, room) if room > 0 else []
        # Chosen first and counted then: those that must wait hold up no other.
        extra = list(islice(self._ready(self.hurried, active), max(room, hurried, 0)))
        if not extra and room <= 0:
            return None
        extra += islice(self._ready(self.extra, active), max(room - len(extra), 0))
        left = self._leave(room, len(extra))
        deep = self.windows.choose(active, left)
        suspect = 0
        if chosen := self._suspects.choose(self.in_flight.jobs, active):
            suspect, origin = chosen
            extra.append((origin, suspect))
        if not (deep or behind or extra):
            return None
        self._seq += self.step
        shared = {
            "owner": self.owner,
            "role": self.role,
            "seq": self._seq,
            "types": self.types,
        }
        few = len(deep) == 1 and not (behind or extra)
        if few and self.windows.is_plain(deep[0]):
            self._following, self._tried = {}, []
            where = self.windows.prepare_plain(deep[0], room)
            return f"claim_plain{self._kind}", shared | where | self._list_full()
        self._following = {(o, g): at for o, g, at in behind}
        self._tried = [i for _, i in extra]
        touched = sorted({*deep, *(o for o, _ in extra), *(o for o, _, _ in behind)})
        # Groups that are asked for anyway need no look for their heads.
        busy = self.in_flight.lanes.keys() | self._following
        floors = self.group_starts.choose(touched, busy)
        return f"claim{self._kind}", {
            **shared,
            "known": [*self._every, *self._foreign],
            **self.lasts,
            **self._list_full(),
            "suspect": suspect,
            "room": max(room, 1),
            "lane": max(2, min(room, _LONGEST_LANE)),
            "origins": text_array(touched),
            "epochs": int_array(self.cursors[o].epoch for o in touched),
            **self.windows.prepare(deep, max(1, left - _LANE * len(behind))),
            "extra_origins": text_array([o for o, _ in extra]),
            "extra_ids": int_array(i for _, i in extra),
            "busy_origins": text_array([o for o, _ in busy]),
            "busy_groups": text_array([g for _, g in busy]),
            "floor_origins": text_array([o for o, _, _ in floors]),
            "floor_groups": text_array([g for _, g, _ in floors]),
            "floor_ids": int_array(floor for _, _, floor in floors),
            "next_origins": text_array([o for o, _, _ in behind]),
            "next_groups": text_array([g for _, g, _ in behind]),
            "next_ids": int_array(
                at or self.group_starts.find((o, g)) for o, g, at in behind
            ),
            "next_piles": [(o, g) in self._superseding for o, g, _ in behind],
        }

    def _note_foreign(self) -> None:
        """Leave alone what other apps know now."""
        foreign = self._get_foreign()
        if foreign is not self._foreign:
            self._foreign = foreign
            self._values["others"] = sorted(self.section.others | foreign)

    def _ready(
        self, rows: Mapping[int, str], active: Mapping[str, Cursor]
    ) -> Iterator[tuple[str, int]]:
        """Those that may be claimed now, of rows to claim by id."""
        return (
            (origin, job_id)
            for job_id, origin in rows.items()
            if job_id not in self.in_flight.jobs
            and origin in active
            # Before the first look nobody knows what is paused.
            and active[origin].seen
        )

    def _leave(self, room: int, asked: int) -> int:
        """Room for what lies behind the cursors: it came after what is asked for by id.

        Of that there may always be more, so some claims leave some all the same.
        """
        left = room - asked
        self._left_none = self._left_none + 1 if left <= 0 else 0
        if left <= 0 and self._left_none % _PATIENCE == 0:
            return max(1, room // 2)
        return max(0, left)

    def _askable(self) -> dict[str, Cursor]:
        """The active origins, but for those that were skipped a moment ago."""
        active = self.active()
        if self._skipped:
            now = time.monotonic()
            self._skipped = {o: at for o, at in self._skipped.items() if now < at}
            return {o: p for o, p in active.items() if o not in self._skipped}
        return active

    @property
    def was_skipped(self) -> bool:
        """Whether there is an origin that is to be asked again soon."""
        return bool(self._skipped)

    def prepare_jump(self, room: int) -> tuple[str, dict[str, Any]] | None:
        """A query that finds the way past what cannot run; None if nothing is stuck."""
        # Read only where something is stuck: this is asked in every round.
        busy = chain(self.in_flight.lanes, self.in_flight.behind)
        asked = self.windows.prepare_jump(
            self._askable(), room, busy, self.group_starts
        )
        if asked is None:
            return None
        # An unknown type is claimed until the claim has told of it in this origin.
        told = {type_ for type_, origin in self._unknown if origin == asked["origin"]}
        paused = self._paused.get("type", frozenset())
        skipped = [*self._values["others"], *paused, *told]
        asked |= self.lasts | self._list_full() | {"skipped_types": skipped}
        return f"jump{self._kind}", asked

    def read_jump(
        self,
        asked: Mapping[str, Any],
        row: tuple[list[int], int | None, int, list[int], list[str]],
    ) -> None:
        """Take note of what a jump has found; the next claim asks for it by id."""
        full_ids, full_values = row[3:]
        origin = asked["origin"]
        self._add_extra(self.windows.read_jump(asked, row[:3], self.in_flight))
        if self.section.others:
            # Whose head others have in flight, only they reach.
            self.shared.append((origin, "", None))
        if full_ids and (cursor := self.cursors.get(origin)):
            for value, job_id in zip(full_values, full_ids, strict=True):
                # What lies behind the cursor's new place is met again.
                if job_id <= cursor.at and job_id not in self.in_flight.jobs:
                    self.passed.add(origin, value, job_id)

    def hurry(self, rows: Mapping[int, str]) -> None:
        """Claim these by id, before all others."""
        self.hurried |= {i: o for i, o in rows.items() if o in self.cursors}

    def _add_extra(self, rows: Mapping[int, str]) -> None:
        """Claim these by id, if their origin was not given away meanwhile."""
        self.extra |= {i: o for i, o in rows.items() if o in self.cursors}

    def _list_full(self) -> dict[str, Any]:
        """The parameters of the part ``unfull``: of which values enough wait here."""
        if not self._kind:
            return self._values
        full = {*self.passed.full(), *self.passed.values}
        refilled = int_array(i for i in self._tried if i in self._refilled)
        return self._values | {"full": text_array([*full]), "refilled": refilled}

    def _refill(self, active: Mapping[str, Cursor]) -> None:
        """Ask by id for what was passed over, where fewer of its value wait now."""
        if self.passed.is_overflown and not self.passed:
            self._rewind()
        taken = self.passed.take(active, {*self._refilled.values()})
        for value, origin, job_id in taken:
            self._refilled[job_id] = value
            self.extra[job_id] = origin

    def _rewind(self) -> None:
        """Look again from the start: what was passed over may run now."""
        self.windows.rewind()
        self.passed.clear()

    def follow(self, origin: str, group: str, *, at_once: bool) -> None:
        """Another section says that a group may go on here.

        Args:
            origin: of the group.
            group: its name; "" for all that are in flight there.
            at_once: whether its next job is one of this section's types.
        """
        if origin not in self.cursors:
            return
        if lane := self.in_flight.lanes.get((origin, group)):
            lane.more = True
        elif not group:
            for (lies, _), lane in self.in_flight.lanes.items():
                lane.more |= lies == origin
        if at_once and (origin, group) not in self.in_flight.lanes:
            self.in_flight.behind.setdefault((origin, group), 0)

    def take_due(self, rows: Iterable[tuple[str, int, str | None, str]]) -> None:
        """Claim these by id, which are due: origins, ids, groups and types.

        Those of other types are left for their sections.
        """
        for origin, job_id, group, type_ in rows:
            if group is not None:
                self.group_starts.lower((origin, group), job_id)
            if type_ not in self.section.others and type_ not in self._foreign:
                self._add_extra({job_id: origin})

    def _choose_behind(
        self, active: Mapping[str, Cursor], room: int
    ) -> list[tuple[str, str, int]]:
        found = (
            (origin, group, at)
            for (origin, group), at in self.in_flight.behind.items()
            if origin in active
        )
        # Few and long lanes cost least; the others come with the next claim.
        return list(islice(found, max(_LANE, room // _LANE)))

    # What was found

    def read(self, rows: Iterable[tuple[Any, ...]]) -> tuple[list[Item], list[Outcome]]:
        """What the claim took, now that it is known that it has committed.

        Returns what is for the workers, in order, and what is settled without a run.
        What comes before all that waits for a worker is in ``urgent``.
        """
        found = self._sort(rows)
        self._forget_asked(found)
        self.in_flight.lanes.update(found.lanes)
        if found.claimed:
            # Even if all were in flight already: the claim's row must go some day.
            self.in_flight.add_claim(self._seq, len(found.jobs))
        # What was asked for by its group says nothing of the window.
        taken = {
            (job.lane.origin, job.priority)
            for job in found.jobs
            if (job.lane.origin, job.group) not in self._following
        }
        for row in found.looks:
            self._note(row, taken)
        for key, lane in found.lanes.items():
            # Behind any other id the claim has not looked for the head of the group.
            if not self._following.get(key):
                low = self.cursors[key[0]].swept_below
                self.group_starts.note(key, lane.jobs[0].id, len(lane.jobs), low)
        cut = sum(lane.more for lane in found.lanes.values())
        self.windows.note_lanes(len(found.lanes), cut)
        if self.section.parameter:
            for lane in found.lanes.values():
                self._keep_one_value(lane)
        outcomes = [
            outcome
            for lane in found.lanes.values()
            for outcome in self._settle_early(lane, found)
        ]
        outcomes += [
            explain_crashes(job, self._types[job.type].retry)
            for job in found.jobs
            if job.crashes >= GUILTY and job.group is None
        ]
        items = found.items
        if outcomes:
            held = {id(o.frees) for o in outcomes} | {id(o.job) for o in outcomes}
            items = [item for item in items if id(item) not in held]
        if found.ages:
            items = [item for item in items if _head(item)]
        if self._tried:
            # They came before what the windows have found.
            asked = {*self._tried}
            items.sort(key=lambda item: not ((h := _head(item)) and h.id in asked))
        if self.windows.prioritized:
            items.sort(key=_rank)
        self.urgent = []
        if self._tried:
            self.urgent = [i for i in items if (h := _head(i)) and h.crashes]
            items = [i for i in items if not ((h := _head(i)) and h.crashes)]
        if found.jobs:
            telemetry.emit("jobs.claimed", count=len(found.jobs))
        return items, outcomes

    def _forget_asked(self, found: _Found) -> None:
        """What the claim was asked for by name has been asked for.

        But not in an origin that was skipped: what was asked for there lies behind the
        cursor, and nothing else would lead to it.
        """
        skipped = found.skipped
        for origin in skipped & self.cursors.keys():
            self._skipped[origin] = time.monotonic() + SKIP_PAUSE
            self.cursors[origin].may_have_more = True
        for job_id in self._tried:
            for rows in (self.hurried, self.extra):
                if rows.get(job_id) not in skipped:
                    rows.pop(job_id, None)
        for key in self._following:
            if key[0] not in skipped:
                self.in_flight.behind.pop(key, None)
        if self._refilled:
            left = self.extra
            # Some may have ended since: then there is still room for more.
            asked = {v for i, v in self._refilled.items() if i not in left}
            self.passed.hungry.update(asked)
            self._refilled = {i: v for i, v in self._refilled.items() if i in left}
        self._suspects.asked(skipped)

    def _sort(self, rows: Iterable[tuple[Any, ...]]) -> _Found:
        """Make jobs and lanes of the rows that are jobs; one pass, for each job."""
        found = _Found()
        jobs, items, lanes, ages = found.jobs, found.items, found.lanes, found.ages
        flying, open_lanes = self.in_flight.jobs, self.in_flight.lanes
        lingering = self.in_flight.lingering
        free: dict[str, Lane] = {}
        by_value = bool(self._kind)
        for row in rows:
            kind, origin, job_id, type_, group = row[:5]
            if kind:
                if kind == _SKIPPED:
                    found.skipped.add(origin)
                elif kind == _NEWER:
                    found.newer[origin, group] = job_id
                else:
                    found.looks.append(row)
                continue
            found.claimed = True
            if job_id in flying or origin not in self.cursors or job_id in lingering:
                continue
            failures, crashes, priority, payload = row[5:9]
            run_at, enqueued, headers, cut, delayed, age, place = row[9:16]
            if headers is not None and type(headers) is not dict:
                headers = None  # past all doors, SQL writes what it likes
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
                lane.more = cut or crashes >= SUSPECT
            job = ClaimedJob(
                job_id, type_, group, failures + crashes + 1, crashes, priority,
                payload, run_at, enqueued, headers, lane.origin, lane.installation,
                lane, place,
            )  # fmt: skip
            if by_value:
                job.value = row[16]
            jobs.append(job)
            flying[job_id] = job
            if group is None:
                items.append(job)
            else:
                lane.jobs.append(job)
                if age is not None:
                    ages[job_id] = delayed, age
        for lane in chain(free.values(), lanes.values()):
            # Only now: if the origin was given up meanwhile, these are in flight then.
            if self.cursors[lane.origin].leaving:
                lane.dropped = True
        return found

    def _open_lane(self, origin: str, group: str | None) -> Lane:
        cursor = self.cursors[origin]
        return Lane(
            origin, cursor.epoch, group, self._seq, self._installation, self.finished,
            self._lease, self.server,
        )  # fmt: skip

    def _note(self, row: tuple[Any, ...], taken: set[tuple[str, int]]) -> None:
        kind, origin, job_id, type_, group, count, _, level = row[:8]
        if origin not in self.cursors:
            return
        if kind == _WINDOW:
            barren = (origin, 0) not in taken
            self.windows.note(
                origin, level, job_id, count, plain=bool(row[12]), barren=barren
            )
        elif kind == _PASSED:
            if lane := self.in_flight.lanes.get((origin, group)):
                flying = job_id in self.in_flight.jobs
                # A lane of this same claim has read what there is behind its rows.
                lane.more |= not (flying and lane.seq == self._seq)
                if job_id < lane.last and not flying:
                    lane.late = job_id
        elif kind == _UNKNOWN:
            self._report_unknown(type_, origin, count)
        elif kind == _FOREIGN:
            # Another app finds by itself where its groups go on.
            if type_ in self.section.others:
                self.shared.append((origin, group, type_))
        elif kind == _BEHIND:
            if self.section.others:
                self.shared.append((origin, group, None))
        elif kind == _ENDS:
            if lane := self.in_flight.lanes.get((origin, group)):
                lane.more = True
        elif kind == _FULL:
            if job_id not in self.in_flight.jobs:
                self.passed.add(origin, row[16], job_id)
        else:
            self._suspects.add(job_id, origin)

    def _settle_early(self, lane: Lane, found: _Found) -> list[Outcome]:
        """What of a lane is settled before the rest of it may start."""
        head = lane.jobs[0]
        before = list(lane.jobs)
        if head.crashes >= GUILTY:
            ends = [explain_crashes(head, self._types[head.type].retry)]
            lane.jobs.clear()
            lane.failed = ends[0].result is Result.RETRIED
        # A suspect is alone in its lane, so whether it is the last is not to be seen.
        elif found.ages and head.crashes < SUSPECT:
            newer = found.newer.get((lane.origin, str(lane.group)))
            ends = supersede(lane, self._last, found.ages, self._superseding, newer)
        else:
            return []
        kept = {id(job) for job in lane.jobs} | {id(end.job) for end in ends}
        for job in before:
            if id(job) not in kept:
                self.give_back(job)
        if ends:
            ends[-1].frees = lane
        elif not lane.jobs:
            self.in_flight.end_lane(lane)
        return ends

    def _keep_one_value(self, lane: Lane) -> None:
        """Leave in a lane what is of its head's value: one start of it is counted."""
        head, *behind = lane.jobs
        lane.value = head.value or ""
        for place, job in enumerate(behind, 1):
            if job.value != head.value:
                lane.more, lane.last = True, job.id - 1
                for other in behind[place - 1 :]:
                    self.give_back(other)
                    lane.jobs.pop()
                return

    def note_failed(self, job: ClaimedJob) -> None:
        """A job waits for its next attempt: one that runs last only may give way."""
        job.lane.yields = job.type in self._last

    def give_back(self, job: ClaimedJob) -> None:
        """A claimed job will not run now: take it out of its claim."""
        self.in_flight.remove(job)
        self.given_back.append(job)

    def take_back(self, item: Item) -> None:
        """What no worker has begun: it is claimed again when there is room."""
        head = item if isinstance(item, ClaimedJob) else item.jobs[0]
        again = self.hurry if head.crashes else self._add_extra
        again({head.id: head.lane.origin})
        if isinstance(item, ClaimedJob):
            self.give_back(item)
            return
        for job in item.jobs:
            self.give_back(job)
        item.jobs.clear()
        item.more = False
        self.in_flight.end_lane(item)

    def note_ended(self) -> None:
        """Jobs have landed: a suspect among them keeps no other back any more."""
        self._suspects.note_ended(self.in_flight.jobs)

    def look_again(self, job: ClaimedJob) -> None:
        """A job was dropped before it began: claim it anew, if its origin is owned."""
        # A group's lane says by itself where the group goes on.
        if job.group is None:
            self._add_extra({job.id: job.lane.origin})

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


def _rank(item: Item) -> int:
    """High before normal before batch; a lane ranks by its head."""
    head = _head(item)
    return -head.priority if head else 0


def _head(item: Item) -> ClaimedJob | None:
    if isinstance(item, Lane):
        return item.jobs[0] if item.jobs else None
    return item
