"""Decide whether a job is to blame when its own transaction loses the connection.

A restart of the server or a network failure cuts all connections of a process. A job
cuts only its own if its statement kills the backend, or if its handler lets the
transaction idle for too long. So a loss counts as a failed attempt if it is not the
job's first in a row, and if the dispatcher's connection is older than the transaction
that the job lost before and still works. It proves nothing about the newest loss: where
all connections are cut, they are cut one after the other, and the dispatcher's own may
be the last. A crash of a backend cuts all connections, like a restart: if it always
happens with the same job, the job is blamed.

A server that has no room, or is read-only, refuses a handler's statement and cuts no
connection. That never counts: the dispatcher's own writes are small and succeed even on
a full disk, so they prove nothing. But the pauses grow. So it is if Kafka is away, to
which a handler publishes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from jobs_lib.backoff import RECONNECT
from jobs_lib.executor.lane import Result

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from jobs_lib.executor.lane import ClaimedJob, Outcome
    from jobs_lib.jobs.type import JobType

_ALONE = 2
"""Losses in a row that are the job's fault if the dispatcher lost no connection."""
_TOGETHER = 5
"""Losses in a row that are the job's fault in any case."""
_NONE = 0, -math.inf
_MOST = 10_000
_LOSS = "lost connection"
"""Stands in place of the error's class."""


class Losses:
    """Counts each job's losses in a row, in this process; used by one thread."""

    def __init__(self, types: Mapping[str, JobType[Any]]) -> None:
        self._types = types
        self._counts: dict[int, tuple[int, float]] = {}
        """For each job, its losses and when the last lost transaction began."""

    def judge(self, outcomes: Iterable[Outcome], connected_at: float) -> list[Outcome]:
        """Decide what to write. Nothing is counted yet: the write may fail.

        Args:
            outcomes: the outcomes of attempts that have ended.
            connected_at: when the connection was made that will write them.
        """
        return [
            outcome
            if outcome.lost_since is None
            else self._judge(outcome, outcome.lost_since, connected_at)
            for outcome in outcomes
        ]

    def note(self, completed: Iterable[ClaimedJob], judged: Iterable[Outcome]) -> None:
        """Count the losses: these outcomes are written now."""
        for outcome in judged:
            job = outcome.job
            if outcome.lost_since is None:
                self._counts.pop(job.id, None)
                continue
            count, _ = self._counts.get(job.id, _NONE)
            self._counts[job.id] = count + 1, outcome.lost_since
            if outcome.result is Result.DISCARDED and job.group is not None:
                job.lane.after = job.id
        if self._counts:
            for job in completed:
                self._counts.pop(job.id, None)
            while len(self._counts) > _MOST:
                del self._counts[next(iter(self._counts))]

    def _judge(self, outcome: Outcome, since: float, connected_at: float) -> Outcome:
        job = outcome.job
        before, since_before = self._counts.get(job.id, _NONE)
        count, alone = before + 1, connected_at < since_before
        policy = self._types[job.type].retry
        if since == -math.inf or count < (_ALONE if alone else _TOGETHER):
            delay = RECONNECT.delay(2 + count)
            return replace(outcome, delay=delay)
        text = f"{outcome.error} ({count} times in a row)"
        if policy.exhausted(job.attempt):
            return replace(outcome, result=Result.DISCARDED, error=text, kind=_LOSS)
        delay, result = policy.delay(job.attempt), Result.RETRIED
        return replace(outcome, result=result, error=text, delay=delay, kind=_LOSS)
