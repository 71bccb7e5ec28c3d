"""Write what became of jobs: completed, retried, discarded; each under the fence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.jobs.model import Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import psycopg

    from jobs_lib.db import Queries
    from jobs_lib.jobs.type import JobType

_EVENTS = {
    "complete": "jobs.completed",
    "retry": "jobs.retried",
    "discard": "jobs.discarded",
}
_QUERIES = {
    Result.COMPLETED: "complete",
    Result.RETRIED: "retry",
    Result.SNOOZED: "retry",
    Result.DISCARDED: "discard",
}


class Completer:
    """Settles outcomes in batches; used by one thread."""

    def __init__(
        self, queries: Queries, owner: UUID, types: Mapping[str, JobType[Any]]
    ) -> None:
        self._queries = queries
        self._owner = owner
        kept = [job_type for job_type in types.values() if job_type.keep is not None]
        self._kept = {
            "types": [job_type.name for job_type in kept],
            "keep": [job_type.keep for job_type in kept],
        }

    def settle(
        self,
        connection: psycopg.Connection[Any],
        outcomes: Sequence[Outcome],
        epochs: dict[str, int],
    ) -> None:
        """Write the outcomes, one statement for each kind.

        Safe to repeat after a lost connection: what was written already is not found
        again. Outcomes of origins that are no longer owned change nothing.
        """
        batches: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            query = _QUERIES.get(outcome.result)
            if query and not outcome.job.completed:
                batches.setdefault(query, []).append(outcome)
        for query, batch in batches.items():
            self._settle_batch(connection, query, batch, epochs)

    def end_claims(
        self, connection: psycopg.Connection[Any], seqs: Sequence[int]
    ) -> None:
        """Remove the rows of claims of which nothing is in flight."""
        if seqs:
            connection.execute(
                self._queries["end_claims"],
                {"owner": self._owner, "seqs": list(seqs)},
                prepare=True,
            )

    def _settle_batch(
        self,
        connection: psycopg.Connection[Any],
        query: str,
        batch: list[Outcome],
        epochs: dict[str, int],
    ) -> None:
        # Only the origins touched are locked: the lock's cost grows with their number.
        touched = {o.job.origin for o in batch} & epochs.keys()
        parameters: dict[str, Any] = {
            "owner": self._owner,
            "owned": list(touched),
            "epochs": [epochs[origin] for origin in touched],
            "origins": [outcome.job.origin for outcome in batch],
            "ids": [outcome.job.id for outcome in batch],
        }
        if query != "retry":
            parameters |= self._kept
        if query != "complete":
            parameters["failures"] = [outcome.error for outcome in batch]
        if query == "retry":
            parameters["delays"] = [outcome.delay for outcome in batch]
            parameters["burnt"] = [
                int(outcome.result is Result.RETRIED) for outcome in batch
            ]
        rows = connection.execute(
            self._queries[query], parameters, prepare=True
        ).fetchall()
        written = [row[0] for row in rows]
        if written:
            telemetry.emit(_EVENTS[query], ids=written)
        if len(written) < len(batch):
            expected = {outcome.job.id for outcome in batch if not outcome.job.carried}
            if missing := expected - set(written):
                telemetry.emit("jobs.fenced", ids=sorted(missing))
