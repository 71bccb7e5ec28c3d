"""Write the outcomes of jobs: completed, retried, discarded; each under the fence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.executor.lane import ClaimedJob, Outcome, Result
from jobs_lib.ownership.role import EXECUTE
from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from uuid import UUID

    from jobs_lib.jobs.type import JobType

_QUERIES = {
    Result.RETRIED: "retry",
    Result.SNOOZED: "retry",
    Result.DISCARDED: "discard",
    Result.SUPERSEDED: "remove",
    Result.CANCELLED: "remove",
}
_EVENTS = {
    "complete": "jobs.completed",
    "retry": "jobs.retried",
    "discard": "jobs.discarded",
    "remove": "jobs.removed",
}


@dataclass(frozen=True, slots=True)
class Settlement:
    """One statement that writes outcomes of one kind."""

    query: str
    parameters: dict[str, Any]
    jobs: Sequence[ClaimedJob]
    result: Result


class Completer:
    """Prepares statements that write outcomes, and reads the answers; sends nothing."""

    def __init__(
        self, owner: UUID, types: Mapping[str, JobType[Any]], role: str = EXECUTE
    ) -> None:
        self._owner = {"owner": owner, "role": role}
        self.types = types
        kept = {name: t.keep for name, t in types.items() if t.keep is not None}
        done = [name for name, t in types.items() if t.discarded_is_done]
        self._done_types = text_array(done)
        self._kept = {"types": text_array([*kept]), "keep": int_array(kept.values())}

    def prepare(
        self,
        completed: Sequence[ClaimedJob],
        outcomes: Iterable[Outcome],
        epochs: Mapping[str, int],
    ) -> list[Settlement]:
        """Make the statements, one for each kind of outcome.

        They can be sent again after a lost connection: jobs whose outcome is written
        are not found again. Outcomes of origins no longer owned change nothing.
        """
        settlements = []
        left = [job for job in completed if not job.completed]
        if left:
            parameters = self._address(left, epochs) | self._kept
            parameters["places"] = text_array([job.place for job in left])
            result = Result.COMPLETED
            settlements.append(Settlement("complete", parameters, left, result))
        batches: dict[Result, list[Outcome]] = {}
        for outcome in outcomes:
            if outcome.result in _QUERIES:
                batches.setdefault(outcome.result, []).append(outcome)
        for result, batch in batches.items():
            query = _QUERIES[result]
            jobs = [outcome.job for outcome in batch]
            parameters = self._address(jobs, epochs)
            if query == "retry":
                parameters |= {
                    # All floats: psycopg refuses a list of floats and integers.
                    "delays": [float(outcome.delay) for outcome in batch],
                    "untils": [outcome.until for outcome in batch],
                    "failed": [o.result is Result.RETRIED for o in batch],
                    "counted": int_array(o.job.attempt - 1 for o in batch),
                }
            else:
                parameters |= self._kept
            if query == "remove":
                parameters["outcome"] = result.value
                parameters["by"] = [outcome.by for outcome in batch]
            else:
                parameters["failures"] = [outcome.error for outcome in batch]
                parameters["traces"] = [outcome.trace for outcome in batch]
                parameters["burnt"] = int_array(
                    int(o.ran and o.result is not Result.SNOOZED) for o in batch
                )
            if query == "discard":
                parameters["done_types"] = self._done_types
            settlements.append(Settlement(query, parameters, jobs, result))
        return settlements

    def read(
        self, settlement: Settlement, rows: Iterable[tuple[int]], *, again: bool
    ) -> Sequence[ClaimedJob]:
        """Emit events for written and refused outcomes; return the jobs of the written.

        Args:
            settlement: the statement that was sent.
            rows: its answer.
            again: whether it was sent before, but the answer was lost.
        """
        written = [row[0] for row in rows]
        if written:
            telemetry.emit(_EVENTS[settlement.query], ids=written)
        if len(written) < len(settlement.jobs) and not again:
            expected = {job.id for job in settlement.jobs if not job.carried}
            if missing := expected - set(written):
                telemetry.emit("jobs.fenced", ids=sorted(missing))
        if len(written) == len(settlement.jobs):
            return settlement.jobs
        found = set(written)
        return [job for job in settlement.jobs if job.id in found]

    def _address(
        self, jobs: Sequence[ClaimedJob], epochs: Mapping[str, int]
    ) -> dict[str, Any]:
        # Jobs claimed before their origin was released and taken again find no row.
        origins = [
            job.lane.origin
            if epochs.get(job.lane.origin) == job.lane.epoch and not job.overtaken
            else ""
            for job in jobs
        ]
        # Lock only the origins of these jobs: the cost grows with their number.
        touched = sorted(set(origins) - {""})
        return {
            **self._owner,
            "owned": text_array(touched),
            "epochs": int_array(epochs[origin] for origin in touched),
            "origins": text_array(origins),
            "ids": int_array([job.id for job in jobs]),
        }
