"""Claim jobs of the owned origins: cursors, windows, lanes.

A claim changes no job row. Each origin has a cursor, the highest id looked at, kept
here in memory only: a new owner starts at 0 and finds everything again, because the
rows themselves say what is left. The query ``claim`` reads what lies behind the cursor.
This module makes the queries' parameters and reads their answers; it sends nothing.
``docs/claim.md`` explains the difficult parts.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.executor.claiming.early_ends import EarlyEnds, keep_one_value
from jobs_lib.executor.claiming.found import put_in_order, read_rows
from jobs_lib.executor.claiming.gated import GatedRows
from jobs_lib.executor.claiming.group_starts import GroupStarts
from jobs_lib.executor.claiming.in_flight import InFlight
from jobs_lib.executor.claiming.next_groups import NextGroups
from jobs_lib.executor.claiming.passed import Passed
from jobs_lib.executor.claiming.refills import Refills
from jobs_lib.executor.claiming.rows import CLOSED, FULL, UNKNOWN, WAITING
from jobs_lib.executor.claiming.scope import Scope
from jobs_lib.executor.claiming.suspects import Suspects
from jobs_lib.executor.claiming.wanted import WantedRows
from jobs_lib.executor.claiming.windows import Windows
from jobs_lib.executor.lane import ClaimedJob, Finished, Lane, find_head
from jobs_lib.executor.section import Section
from jobs_lib.ownership.lease import UNLIMITED, Lease
from jobs_lib.ownership.role import EXECUTE
from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Mapping
    from uuid import UUID

    from jobs_lib.executor.claiming.cursor import Cursor
    from jobs_lib.executor.claiming.found import Found
    from jobs_lib.executor.claiming.rows import ClaimRow, Due, JumpRow
    from jobs_lib.executor.lane import Item, Outcome
    from jobs_lib.executor.limiting.gate import JobGate
    from jobs_lib.executor.round_trip import Statement
    from jobs_lib.jobs.type import JobType

_LANE = 8
_LONGEST_LANE = 1_000


class Claimer:
    """The owner's side of the claim; used by one thread.

    A claim uses three methods: :meth:`prepare` makes the statement, :meth:`read` makes
    jobs and lanes from its answer, and :meth:`prepare_jump` looks further if nothing
    can run.
    """

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
        gate: JobGate | None = None,
    ) -> None:
        """Prepare to claim.

        Args:
            owner: the process, as the owner of origins.
            installation: the database's identity.
            types: the handlers, by the name of their type.
            first: the number of the first claim.
            step: the distance to the next number: an owner may have several claimers.
            alone: held while a suspect is in flight, by one of those claimers.
            lease: returns the owner's current lease.
            section: the types to claim; all by default.
            role: the role in which the owner has its origins.
            foreign: returns the types that other apps know.
            gate: of the section, if its types wait for other groups.
        """
        self.section = section or Section(frozenset(types))
        self.owner = owner
        self.role = role
        self.first = first
        self.step = step
        self.server = 0
        """The server that answers; 0 is unknown. See the query ``read_server``."""
        self.finished = Finished()
        """The place that takes claimed jobs when they have ended."""
        self.scope = Scope(self.section, types, foreign)
        self.in_flight = InFlight()
        self.group_starts = GroupStarts()
        self.windows = Windows()
        self.cursors = self.windows.cursors
        self.wanted = WantedRows(self.cursors, self.in_flight.jobs)
        self.urgent: list[Item] = []
        """The hurried jobs that the last claim found."""
        self.passed = Passed()
        """Jobs passed over only because of their value."""
        self.refills = Refills(self.passed, self.section.parameter)
        self.gated = GatedRows(gate, self.section.types)
        """Up to where the gates are open that its types wait for."""
        self._suffix = self.refills.suffix + self.gated.suffix
        self.early_ends = EarlyEnds(types, self.section.types, self.in_flight)
        self.next_groups = NextGroups(
            self.in_flight, self.group_starts, self.section.others
        )
        self._installation = installation
        self._get_lease = lease
        self._lease = lease()
        self._seq = first
        self._suspects = Suspects(alone)

    # Owned origins

    def take(self, origins: Mapping[str, int]) -> None:
        """Start to claim from origins that were taken over, at their epochs."""
        self.windows.take(origins)

    def stop_claiming(self, origins: Iterable[str]) -> list[ClaimedJob]:
        """Claim nothing more from origins; return their jobs in flight, now dropped.

        Running ones can still be settled, until :meth:`release`.
        """
        leaving = frozenset(origins)
        for origin in leaving:
            if cursor := self.cursors.get(origin):
                cursor.leaving = True
        # A copy, because other threads call this, too.
        flying = self.in_flight.jobs.copy().values()
        jobs = [job for job in flying if job.lane.origin in leaving]
        for job in jobs:
            job.lane.dropped = True
        return jobs

    def release(self, origins: Iterable[str]) -> list[ClaimedJob]:
        """Forget origins; return their jobs that were still in flight."""
        gone = frozenset(origins)
        self.windows.release(gone)
        self.wanted.release(gone)
        self._suspects.release(gone)
        self.early_ends.release(gone)
        self.group_starts.release(gone)
        self.passed.release(gone)
        self.gated.release(gone)
        return self.in_flight.release(gone)

    @property
    def epochs(self) -> dict[str, int]:
        """The owned origins and their epochs."""
        return {origin: cursor.epoch for origin, cursor in self.cursors.items()}

    def active(self) -> dict[str, Cursor]:
        """The origins that may be claimed from at present."""
        return self.scope.find_active(self.cursors)

    def pause(self, paused: dict[str, frozenset[str]], resumes: int = 0) -> None:
        """Stop running these types and origins, and run all others.

        Paused groups are left out by the claims themselves.

        Args:
            paused: names by kind, ``type`` or ``origin``.
            resumes: how often pauses have ended, those of groups included. If the
                number has changed, the claimer looks again at what it passed over.
        """
        if self.scope.pause(paused, resumes):
            self._rewind()

    def doubt(self) -> None:
        """Forget what is known of the rows: the last commits may be lost."""
        self.windows.doubt()
        self.passed.clear()
        self.group_starts.clear()
        self.wanted.clear()
        self.in_flight.doubt()
        self._suspects.clear()
        self.next_groups.ask([])
        self.refills.clear()
        self.gated.doubt()

    def _rewind(self) -> None:
        """Look again from the start: jobs that were passed over may run now."""
        self.windows.rewind()
        self.passed.clear()

    # Asking

    @property
    def seq(self) -> int:
        """The number of the last claim."""
        return self._seq

    @property
    def is_barred(self) -> bool:
        """Whether the owner may begin no job now, so that a claim would be useless."""
        return self._get_lease().is_over()

    def prepare(self, room: int, hurried: int = 0) -> Statement | None:
        """A query that claims about ``room`` jobs, and its parameters.

        None if there is nothing to look at. Hurried jobs may have more room than
        others.
        """
        # Now, not when the answer comes: the process may stand still in between.
        self._lease = self._get_lease()
        self.scope.note_foreign()
        active = self.scope.find_askable(self.cursors)
        self._add_what_has_come_up(active)
        behind = self.next_groups.choose(active, room)
        wanted = self.wanted.choose(active, room, hurried)
        if not wanted and room <= 0:
            return None
        left = self.wanted.leave(room, len(wanted))
        deep = self.windows.choose(active, left)
        suspect = 0
        if chosen := self._suspects.choose(self.in_flight.jobs, active):
            suspect, origin = chosen
            wanted.append((origin, suspect))
        if not (deep or behind or wanted):
            return None
        self._seq += self.step
        self.next_groups.ask(behind)
        self.wanted.asked = [i for _, i in wanted]
        shared = {
            "owner": self.owner,
            "role": self.role,
            "seq": self._seq,
            "types": self.scope.types,
            **self.scope.parameters(),
            **self.refills.parameters(self.wanted.asked, suspect),
            **self.gated.parameters(),
        }
        alone = len(deep) == 1 and not (behind or wanted)
        if alone and self.windows.is_plain(deep[0]):
            where = self.windows.prepare_plain(deep[0], room)
            return f"claim_plain{self._suffix}", shared | where
        touched = sorted({*deep, *(o for o, _ in wanted), *(o for o, _, _ in behind)})
        return f"claim{self._suffix}", {
            **shared,
            "known": self.scope.known,
            **self.early_ends.parameters(),
            "suspect": suspect,
            "room": max(room, 1),
            "lane": max(2, min(room, _LONGEST_LANE)),
            "origins": text_array(touched),
            "epochs": int_array(self.cursors[o].epoch for o in touched),
            **self.windows.prepare(deep, max(1, left - _LANE * len(behind))),
            "extra_origins": text_array([o for o, _ in wanted]),
            "extra_ids": int_array(self.wanted.asked),
            **self.next_groups.parameters(touched, self.early_ends),
        }

    def _add_what_has_come_up(self, active: Mapping[str, Cursor]) -> None:
        """Ask by id for late jobs of groups, and for jobs that have room again."""
        self.wanted.add(self.in_flight.late)
        self.in_flight.late.clear()
        if self.passed or self.passed.is_overflown:
            if self.passed.is_overflown and not self.passed:
                self._rewind()
            self.wanted.add(self.refills.choose(active, self.wanted.extra))

    # Reading

    def read(self, rows: Iterable[tuple[Any, ...]]) -> tuple[list[Item], list[Outcome]]:
        """The jobs that the claim took; called once it is known to have committed.

        Return the items for the workers, in order, and the outcomes that are settled
        without a run. Items that go before all waiting ones are in ``urgent``.
        """
        by_value = self.section.parameter is not None
        found = read_rows(
            rows, self.cursors, self.in_flight, self._open_lane, by_value=by_value,
            gated=self.gated.gate is not None,
        )  # fmt: skip
        self._forget_asked(found.skipped)
        self.in_flight.lanes.update(found.lanes)
        if found.claimed:
            # Even if all were in flight already: the claim's row must be deleted later.
            self.in_flight.add_claim(self._seq, len(found.jobs))
        self._note_seen(found)
        self.next_groups.note_lanes(found.lanes, self.cursors)
        cut = sum(lane.more for lane in found.lanes.values())
        self.windows.note_lanes(len(found.lanes), cut)
        items, outcomes = self.early_ends.settle(found)
        if by_value:
            # Only now: a job may replace older ones of other values.
            for lane in found.lanes.values():
                keep_one_value(lane, self.in_flight)
        if found.ages:
            items = [item for item in items if find_head(item)]
        self.urgent, items = put_in_order(
            items, self.wanted.asked, prioritized=self.windows.prioritized
        )
        if found.jobs:
            telemetry.emit("jobs.claimed", count=len(found.jobs))
        return items, outcomes

    def _open_lane(self, origin: str, group: str | None) -> Lane:
        cursor = self.cursors[origin]
        return Lane(
            origin, cursor.epoch, group, self._seq, self._installation, self.finished,
            self._lease, self.server,
        )  # fmt: skip

    def _forget_asked(self, skipped: set[str]) -> None:
        """Note that the claim has answered for the ids and groups it was asked for.

        Not in an origin that was skipped: its rows lie behind the cursor, and nothing
        else would lead to them.
        """
        for origin in skipped & self.cursors.keys():
            self.scope.skip(origin)
            self.cursors[origin].may_have_more = True
        self.wanted.forget_asked(skipped)
        self.next_groups.forget_asked(skipped)
        self.refills.forget_asked(self.wanted.extra)
        self._suspects.asked(skipped)

    def _note_seen(self, found: Found) -> None:
        """Note where the claim has looked, and which rows it has passed over."""
        # Rows asked for by their group say nothing about the window.
        taken = {
            (job.lane.origin, job.priority)
            for job in found.jobs
            if (job.lane.origin, job.group) not in self.next_groups.asked
        }
        for origin, level, furthest, count, plain in found.windows:
            if origin in self.cursors:
                barren = (origin, 0) not in taken
                self.windows.note(
                    origin, level, furthest, count, plain=plain, barren=barren
                )
        for row in found.seen:
            if row.origin in self.cursors:
                self._note(row)

    def _note(self, row: ClaimRow) -> None:
        if row.kind == UNKNOWN:
            self.scope.report_unknown(row.type, row.origin, row.rows)
        elif row.kind == WAITING:
            self._suspects.add(row.id, row.origin)
        elif row.kind == FULL:
            if row.id not in self.in_flight.jobs:
                self.passed.add(row.origin, str(row.value), row.id)
        elif row.kind == CLOSED:
            self.gated.note(row.origin, [row.crashes], [row.id])
        else:
            self.next_groups.note(row, self._seq)

    # Past jobs that cannot run

    def prepare_jump(self, room: int) -> Statement | None:
        """A query that looks past jobs that cannot run; None if no origin is stuck."""
        # The check for stuck origins comes first, because every round runs this.
        busy = chain(self.in_flight.lanes, self.in_flight.behind)
        active = self.scope.find_askable(self.cursors)
        asked = self.windows.prepare_jump(active, room, busy, self.group_starts)
        if asked is None:
            return None
        return f"jump{self._suffix}", {
            **asked,
            **self.early_ends.parameters(),
            **self.refills.parameters(self.wanted.asked),
            **self.gated.parameters(),
            "skipped_types": self.scope.list_stuck_types(asked["origin"]),
        }

    def read_jump(self, asked: Mapping[str, Any], row: JumpRow) -> None:
        """Note the jobs that a jump has found; the next claim asks for them by id."""
        origin = asked["origin"]
        self.wanted.add(self.windows.read_jump(asked, row, self.in_flight))
        self.next_groups.note_jump(origin, asked["cursor"])
        cursor = self.cursors.get(origin)
        if cursor is not None:
            self.gated.note(origin, row.closed_sources, row.closed_offsets)
        if row.full_ids and cursor is not None:
            for value, job_id in zip(row.full_values, row.full_ids, strict=True):
                # The windows meet the rows behind the cursor's new place by themselves.
                if job_id <= cursor.at and job_id not in self.in_flight.jobs:
                    self.passed.add(origin, value, job_id)

    # News from other sections

    def follow(self, origin: str, group: str) -> None:
        """Go on with a group that another section has passed on.

        Args:
            origin: of the group.
            group: its name; "" for all groups that are in flight there.
        """
        if origin in self.cursors:
            self.next_groups.follow(origin, group)

    def take_due(self, rows: Iterable[Due]) -> None:
        """Claim these due jobs by id.

        Jobs of other types are left to their sections.
        """
        for origin, job_id, group, type_ in rows:
            if group is not None:
                self.group_starts.lower((origin, group), job_id)
            if self.scope.is_own(type_):
                self.wanted.add({job_id: origin})

    def look_back(self, lows: Mapping[str, int] | None) -> None:
        """Sweep again: jobs behind the cursors may run, and nobody knows which.

        Args:
            lows: the ids behind which they lie, by origin; None for all.
        """
        for origin, cursor in self.cursors.items():
            if lows is None or origin in lows:
                cursor.far.want(lows[origin] if lows else 0)

    def take_late(self, late: Mapping[int, str]) -> None:
        """Claim by id these jobs, which were committed late: ids with their origins."""
        self.wanted.add({i: o for i, o in late.items() if i not in self.passed})

    # Outcomes

    def note_failed(self, job: ClaimedJob) -> None:
        """A job waits for its next attempt; if it runs last only, it may give way."""
        job.lane.yields = self.early_ends.is_last_only(job.type)

    def take_back(self, item: Item) -> None:
        """Take back jobs that no worker has begun; claims ask for them again later."""
        if head := find_head(item):
            again = self.wanted.hurry if head.crashes else self.wanted.add
            again({head.id: head.lane.origin})
        if isinstance(item, ClaimedJob):
            self.in_flight.release_job(item)
            return
        for job in item.jobs:
            self.in_flight.release_job(job)
        if head:
            # The head is asked for by its id. An empty lane says itself where its group
            # goes on.
            item.jobs.clear()
            item.more = False
        self.in_flight.end_lane(item)

    def note_ended(self) -> None:
        """Jobs have ended: a suspect among them holds back no other any more."""
        self._suspects.note_ended(self.in_flight.jobs)

    def claim_again(self, job: ClaimedJob) -> None:
        """A job was dropped before it began: claim it again, if its origin is owned."""
        # A group's lane itself says where the group goes on.
        if job.group is None:
            self.wanted.add({job.id: job.lane.origin})
