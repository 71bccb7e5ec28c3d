"""Polling: for new jobs, due jobs, late commits, and pauses."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from jobs_lib.executor.batch import Batch
from jobs_lib.executor.claiming.late_commits import LateCommits
from jobs_lib.executor.claiming.poll_depth import PollDepth
from jobs_lib.executor.claiming.rows import HorizonRow
from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    from jobs_lib.executor.batch import Question
    from jobs_lib.executor.claiming.claimer import Claimer
    from jobs_lib.executor.claiming.rows import Due

_BUSY_PAUSE = 0.05
_SHORTEST_PAUSE = 0.006
_HINTED = 10
"""How many times rarer polls are while hints come."""
_HINTED_PAUSE = 0.5
"""The most seconds between polls: no hint comes when a group's head is cancelled, or
when a transaction ends that drew its ids long ago."""
_DUE_MARGIN = 1.0
"""Seconds that a poll looks ahead for due jobs beyond the next poll."""
_PROMOTE_LIMIT = 1_000
_MANY_CANCELLED = 100
"""Requests to cancel that a poll reads; if more, only those for jobs in flight."""


class Poller:
    """When to poll, and what follows from it; used by the dispatcher's thread.

    After an event the next poll comes soon; then polls become rare.
    """

    def __init__(self, claimer: Claimer, poll_interval: float) -> None:
        self.cancelled: frozenset[int] = frozenset()
        """Jobs that somebody asked to stop."""
        self.due: list[Due] = []
        """Due jobs of other sections' types, to be passed on."""
        self.is_promoting = False
        """Whether due jobs may be available since the last answer: nobody knows which.
        """
        self._many_cancelled = False
        self._claimer = claimer
        self._longest = poll_interval
        self._pause = _SHORTEST_PAUSE
        self._hinted = False
        self._next_at = 0.0
        self._due_at = math.inf
        self._late_commits = LateCommits()
        self._depth = PollDepth()

    def doubt(self) -> None:
        """Commits may be lost, and the server may count its transactions anew."""
        self._late_commits = LateCommits()
        self._depth = PollDepth()
        self.poll_soon(0.0)

    def poll_soon(self, pause: float = _SHORTEST_PAUSE) -> None:
        """Something has happened: poll again after a short pause, in seconds."""
        self._pause = _SHORTEST_PAUSE
        self._next_at = min(self._next_at, time.monotonic() + pause)

    def seconds_left(self) -> float:
        """Seconds until the next poll."""
        return max(0.0, min(self._next_at, self._due_at) - time.monotonic())

    def prepare(self, *, busy: bool, hinted: bool) -> list[Batch]:
        """The questions that are due now, in batches; none before their time.

        Args:
            busy: whether jobs are in flight.
            hinted: whether hints can come now: the connection for them is up.
        """
        if hinted is not self._hinted:
            self._hinted = hinted
            self.poll_soon(0.0)
        active = self._claimer.active()
        now = time.monotonic()
        batches: list[Batch] = []
        if not self._claimer.cursors:
            # Nor is any job due: otherwise it would be time for a poll from then on.
            self._next_at, self._due_at = now + self._longest, math.inf
            return batches
        # If every origin is paused, only a poll shows that one no longer is.
        if now >= self._due_at:
            self._due_at = math.inf
            promote = "promote", self._prepare_promote()
            self.is_promoting = True
            batches.append(Batch([(promote, self._read_promoted)]))
        if now >= self._next_at:
            # A process that enqueues sends a hint every five milliseconds: one poll
            # after that finds jobs behind the last hint. Without hints the pauses
            # double.
            self._pause = (
                min(self._longest * _HINTED, max(self._longest, _HINTED_PAUSE))
                if hinted
                else min(self._pause * 2, self._longest)
            )
            self._next_at = now + (_BUSY_PAUSE if busy else self._pause)
            look = {
                **self._depth.prepare(active),
                "due_within": self._pause + _DUE_MARGIN,
                "foreign": self._claimer.scope.foreign,
                "cancelled": _MANY_CANCELLED + 1,
            }
            questions: list[Question] = [(("look", look), self._read_look)]
            if self._many_cancelled:
                ids = {"ids": int_array(self._claimer.in_flight.jobs)}
                questions.append((("find_cancelled", ids), self._read_cancelled))
            if self._late_commits.is_due():
                questions += self._prepare_sweep()
            batches.append(Batch(questions))
        return batches

    def _prepare_promote(self) -> dict[str, Any]:
        active = self._claimer.active()
        return {
            "origins": text_array(list(active)),
            "epochs": int_array(p.epoch for p in active.values()),
            "due_from": self._depth.choose_due(active),
            "foreign": self._claimer.scope.foreign,
            "owner": self._claimer.owner,
            "role": self._claimer.role,
            "limit": _PROMOTE_LIMIT,
        }

    def _prepare_sweep(self) -> list[Question]:
        claimer = self._claimer
        parameters = self._late_commits.prepare(
            claimer.active(),
            claimer.scope.types,
            claimer.in_flight,
            shared=bool(claimer.scope.foreign),
        )
        questions: list[Question] = [(("horizon", {}), self._read_horizon)]
        if parameters is not None:
            parameters |= claimer.early_ends.parameters() | claimer.gated.parameters()
            sweep = f"sweep{claimer.gated.suffix}", parameters
            questions.append((sweep, self._read_sweep))
        return questions

    def _read_look(self, rows: list[tuple[Any, ...]]) -> None:
        paused: dict[str, set[str]] = {}
        cancelled = set()
        windows = self._claimer.windows
        known = windows.prioritized
        # Only a complete poll shows that there is none.
        windows.prioritized = known and not self._depth.complete
        due: dict[str, float] = {}
        fresh: set[str] = set()
        prioritized: set[str | None] = set()
        clock = took = 0.0
        resumes = 0
        for kind, name, delay in rows:
            if kind == "fresh":
                fresh.add(name)
                windows.hint(name)
            elif kind == "due":
                due[name] = delay
            elif kind == "clock":
                # Last of all, when the poll has ended.
                clock, took = float(name), delay
            elif kind == "priority":
                prioritized.add(name)
                windows.prioritized = True
                if not known:
                    # Passed over until now; from here on it has windows of its own.
                    windows.hint("")
            elif kind == "cancel":
                cancelled.add(int(name))
            elif kind == "resumes":
                resumes = int(name)
            else:
                paused.setdefault(kind.removeprefix("pause:"), set()).add(name)
        for cursor in self._claimer.cursors.values():
            cursor.seen = True
        self._depth.note(fresh, due, prioritized, clock, took)
        self._due_at = time.monotonic() + min(due.values(), default=math.inf)
        self._many_cancelled = len(cancelled) > _MANY_CANCELLED
        if not self._many_cancelled:
            self.cancelled = frozenset(cancelled)
        self._claimer.pause(
            {kind: frozenset(names) for kind, names in paused.items()}, resumes
        )

    def _read_cancelled(self, rows: list[tuple[int]]) -> None:
        self.cancelled = frozenset(job_id for (job_id,) in rows)

    def _read_promoted(self, rows: list[Due]) -> None:
        self.is_promoting = False
        self._claimer.take_due(rows)
        others = self._claimer.section.others
        self.due += [
            (origin, job_id, group, type_)
            for origin, job_id, group, type_ in rows
            if type_ in others
        ]
        # None: somebody has locked the origins, probably for a moment only.
        self.poll_soon(0.0 if rows else _SHORTEST_PAUSE)

    def _read_horizon(self, rows: list[tuple[Any, ...]]) -> None:
        horizon = HorizonRow(*rows[0])
        self._late_commits.note_horizon(
            horizon.oldest, horizon.following, horizon.running, self._claimer.cursors
        )

    def _read_sweep(self, rows: list[tuple[Any, ...]]) -> None:
        claimer = self._claimer
        late = self._late_commits.read(
            rows, claimer.active(), claimer.in_flight, claimer.group_starts
        )
        claimer.take_late(late)
        # The rest does not wait until the next poll.
        due_at = self._late_commits.due_at(claimer.active())
        self._next_at = min(self._next_at, due_at)
