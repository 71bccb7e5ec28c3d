"""Claim jobs of the owned origins: cursors, windows, lanes.

A claim changes no job row. Per origin there is a cursor, the highest id that was looked
at, kept here in memory only: a new owner starts at 0 and finds everything again,
because the rows themselves say what is left. The query ``claim`` says what lies behind
the cursor.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.jobs.model import Job, Lane

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    import psycopg

    from jobs_lib.db import Queries

_COLD_WINDOW = 32
_SWEEP_LIMIT = 1_000
_SWEEP_SHARE = 0.05
_SWEEP_PAUSE = 0.05
_FULL_SWEEP_PAUSE = 60.0
_MARK_PAUSE = 0.5


@dataclass(slots=True)
class Position:
    """How far one origin has been looked at."""

    epoch: int
    cursor: int = 0
    low: int = 0
    """Below it no row can still appear: every transaction that could add one ended."""
    window: int = _COLD_WINDOW
    leaving: bool = False
    """Whether it is being given back: nothing more is claimed."""
    deep: bool = False
    """Whether the last window was full, so that more lies behind it."""


@dataclass(slots=True)
class Sweeper:
    """When to look for rows that were committed late, and from where."""

    next_at: float = 0.0
    next_full_at: float = field(
        default_factory=lambda: time.monotonic() + _FULL_SWEEP_PAUSE
    )
    marks: deque[tuple[float, int, dict[str, int]]] = field(default_factory=deque)
    """(taken at, first transaction id not yet given out, cursors then)."""


class Claimer:
    """The owner's side of the claim; used by one thread."""

    def __init__(
        self, queries: Queries, owner: UUID, installation: UUID, types: Iterable[str]
    ) -> None:
        self._queries = queries
        self._owner = owner
        self._installation = installation
        self._types = sorted(types)
        self._positions: dict[str, Position] = {}
        self._flying: dict[int, Lane] = {}
        self._busy: dict[tuple[str, str], Lane] = {}
        self._next: dict[tuple[str, str], int] = {}
        self._extra: dict[int, str] = {}
        self._left: dict[int, int] = {}
        """Jobs still in flight of each claim, by its number."""
        self._seq = 0
        self._sweeper = Sweeper()
        self._unknown: dict[tuple[str, str], int] = {}

    @property
    def flying(self) -> int:
        """Jobs in flight."""
        return len(self._flying)

    @property
    def origins(self) -> dict[str, int]:
        """The owned origins and their epochs."""
        return {origin: position.epoch for origin, position in self._positions.items()}

    def _active(self) -> dict[str, Position]:
        return {o: p for o, p in self._positions.items() if not p.leaving}

    def add(self, origins: Mapping[str, int]) -> None:
        """Start to claim from origins that were taken over, at their epochs."""
        for origin, epoch in origins.items():
            self._positions[origin] = Position(epoch)

    def retire(self, origins: Iterable[str]) -> list[Lane]:
        """Claim nothing more from origins; returns their lanes in flight, now dropped.

        What of them is running can still be settled, until :meth:`drop`.
        """
        leaving = {origin for origin in origins if origin in self._positions}
        for origin in leaving:
            self._positions[origin].leaving = True
        lanes = {
            id(lane): lane for lane in self._flying.values() if lane.origin in leaving
        }
        for lane in lanes.values():
            lane.dropped = True
        self._next = {k: at for k, at in self._next.items() if k[0] not in leaving}
        self._extra = {i: o for i, o in self._extra.items() if o not in leaving}
        return list(lanes.values())

    def drop(self, origins: Iterable[str]) -> None:
        """Forget origins and all that was in flight of them."""
        gone = {origin for origin in origins if self._positions.pop(origin, None)}
        for job_id, lane in list(self._flying.items()):
            if lane.origin in gone:
                self._land(job_id, lane)
        self._busy = {k: lane for k, lane in self._busy.items() if k[0] not in gone}

    def look(self, connection: psycopg.Connection[Any]) -> tuple[bool, bool]:
        """Whether there is anything new, and anything due; costs next to nothing."""
        active = self._active()
        if not active:
            return False, False
        row = connection.execute(
            self._queries["look"],
            {
                "origins": list(active),
                "cursors": [p.cursor for p in active.values()],
            },
            prepare=True,
        ).fetchone()
        assert row is not None
        return bool(row[0] or self._next or self._extra), bool(row[1])

    def promote(self, connection: psycopg.Connection[Any], limit: int) -> int:
        """Make due jobs available and remember them for the next claim."""
        active = self._active()
        if not active:
            return 0
        rows = connection.execute(
            self._queries["promote"],
            {
                "origins": list(active),
                "epochs": [p.epoch for p in active.values()],
                "owner": self._owner,
                "limit": limit,
            },
            prepare=True,
        ).fetchall()
        self._extra.update({job_id: origin for origin, job_id in rows})
        return len(rows)

    def claim(self, connection: psycopg.Connection[Any], room: int) -> list[Lane]:
        """Claim about ``room`` jobs, as lanes; [] when there is nothing to run."""
        active = self._active()
        if not active or room <= 0:
            return []
        self._size_windows(list(active.values()), room)
        self._seq += 1
        extra = [(o, i) for i, o in self._extra.items() if i not in self._flying]
        following = [(o, g, at) for (o, g), at in self._next.items()]
        rows = connection.execute(
            self._queries["claim"],
            {
                "owner": self._owner,
                "seq": self._seq,
                "types": self._types,
                "room": room,
                "lane": min(room, 1_000),
                "origins": list(active),
                "epochs": [p.epoch for p in active.values()],
                "cursors": [p.cursor for p in active.values()],
                "windows": [p.window for p in active.values()],
                "extra_origins": [o for o, _ in extra],
                "extra_ids": [i for _, i in extra],
                "busy_origins": [o for o, _ in self._busy],
                "busy_groups": [g for _, g in self._busy],
                "next_origins": [o for o, _, _ in following],
                "next_groups": [g for _, g, _ in following],
                "next_ids": [at for _, _, at in following],
            },
            prepare=True,
        ).fetchall()
        # Only now is it known that the claim has committed.
        self._extra.clear()
        self._next.clear()
        return self._read(rows)

    def end_job(self, lane: Lane, job: Job) -> None:
        """Forget a job whose outcome is written."""
        self._land(job.id, lane)
        if lane.group is None:
            lane.ended = True

    def end_lane(self, lane: Lane) -> None:
        """Forget a lane; what of it did not run will be claimed again."""
        lane.ended = True
        for job in lane.jobs:
            self._land(job.id, lane)
        if lane.group is None:
            return
        key = (lane.origin, lane.group)
        if self._busy.get(key) is lane:
            del self._busy[key]
            # A lane of one ends where its group ended, unless rows were passed over.
            if not (lane.failed or lane.dropped) and (lane.more or len(lane.jobs) > 1):
                self._next[key] = lane.jobs[-1].id

    def _land(self, job_id: int, lane: Lane) -> None:
        if self._flying.pop(job_id, None) is not None:
            self._left[lane.seq] -= 1

    def ended_claims(self) -> list[int]:
        """The claims of which nothing is in flight any more, each named once."""
        ended = [seq for seq, left in self._left.items() if left == 0]
        for seq in ended:
            del self._left[seq]
        return ended

    def sweep(self, connection: psycopg.Connection[Any]) -> int:
        """Look for rows behind the cursors that were committed late.

        Takes at most a twentieth of the time. Now and then it starts at 0: a
        transaction may have drawn an id before it had a transaction id.
        """
        started = time.monotonic()
        active = self._active()
        if started < self._sweeper.next_at or not active:
            return 0
        self._raise_lows(connection, started)
        rows = connection.execute(
            self._queries["sweep"],
            {
                "origins": list(active),
                "lows": [p.low for p in active.values()],
                "cursors": [p.cursor for p in active.values()],
                "types": self._types,
                "flying": list(self._flying),
                "limit": _SWEEP_LIMIT,
            },
            prepare=True,
        ).fetchall()
        found = 0
        for origin, job_id, group in rows:
            lane = self._busy.get((origin, group)) if group is not None else None
            if lane is not None:
                lane.more = True
            elif job_id not in self._flying:
                self._extra[job_id] = origin
                found += 1
        took = time.monotonic() - started
        self._sweeper.next_at = started + max(_SWEEP_PAUSE, took / _SWEEP_SHARE)
        return found

    def _raise_lows(self, connection: psycopg.Connection[Any], now: float) -> None:
        sweeper = self._sweeper
        row = connection.execute(self._queries["horizon"], prepare=True).fetchone()
        assert row is not None
        oldest, following = row
        while sweeper.marks and sweeper.marks[0][1] <= oldest:
            taken_at, _, cursors = sweeper.marks[0]
            if now - taken_at < 2 * _MARK_PAUSE:
                break
            sweeper.marks.popleft()
            for origin, cursor in cursors.items():
                if marked := self._positions.get(origin):
                    marked.low = max(marked.low, min(cursor, marked.cursor))
        if not sweeper.marks or now - sweeper.marks[-1][0] > _MARK_PAUSE:
            cursors = {o: p.cursor for o, p in self._positions.items()}
            sweeper.marks.append((now, following, cursors))
        if now > sweeper.next_full_at:
            sweeper.next_full_at = now + _FULL_SWEEP_PAUSE
            for position in self._positions.values():
                position.low = 0

    @staticmethod
    def _size_windows(positions: Iterable[Position], room: int) -> None:
        deep = sum(position.deep for position in positions)
        for position in positions:
            position.window = (
                max(_COLD_WINDOW, room // deep) if position.deep else _COLD_WINDOW
            )

    def _read(self, rows: list[tuple[Any, ...]]) -> list[Lane]:
        lanes: list[Lane] = []
        grouped: dict[tuple[str, str], Lane] = {}
        for looked in self._positions.values():
            looked.deep = False
        for row in rows:
            kind, origin, number, type_, group, count, *rest = row
            position = self._positions.get(origin)
            if position is None:
                continue
            if kind == "job":
                if number in self._flying:
                    continue  # a promoted row that the window reached a second time
                payload, run_at, enqueued_at, headers = rest
                job = Job(
                    number, type_, origin, group, count + 1, payload, run_at,
                    enqueued_at, headers, self._installation,
                )  # fmt: skip
                lane = grouped.get((origin, group)) if group is not None else None
                if lane is None:
                    lane = Lane(origin, position.epoch, group, [], self._seq)
                    lanes.append(lane)
                    if group is not None:
                        grouped[origin, group] = lane
                        self._busy[origin, group] = lane
                lane.jobs.append(job)
                self._flying[number] = lane
            elif kind == "cursor":
                position.deep = count >= position.window
                position.cursor = max(position.cursor, number)
            elif kind == "passed":
                if busy := self._busy.get((origin, group)):
                    busy.more = True
            else:
                self._report_unknown(type_, origin, count)
        taken = sum(len(lane.jobs) for lane in lanes)
        if any(row[0] == "job" for row in rows):
            # Even if all were in flight already: the claim's row must go some day.
            self._left[self._seq] = taken
        if taken:
            telemetry.emit("jobs.claimed", count=taken)
        return lanes

    def _report_unknown(self, type_: str, origin: str, count: int) -> None:
        if (type_, origin) not in self._unknown:
            telemetry.emit("jobs.unknown", type=type_, origin=origin, count=count)
        self._unknown[type_, origin] = self._unknown.get((type_, origin), 0) + count
