"""Retry jobs now: discarded ones, and those that wait for their next attempt."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import OperatingError
from jobs_lib.jobs.job import RateLimited, Snooze
from jobs_lib.operating.discarded import BATCH, move_discarded
from jobs_lib.operating.explanation import Explanation, Reason, explain
from jobs_lib.operating.listing import LIMIT, Filter, list_jobs
from jobs_lib.operating.session import bounded, describe_batches, read_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import psycopg

    from jobs_lib.postgres.database import Database

_LIMITED = [RateLimited.__name__]
"""The beginnings of the last error of jobs that would only be put off again."""


@dataclass(slots=True)
class Retried:
    """The result of :func:`retry`."""

    retried: int = 0
    """Jobs that are due now."""
    conflicts: list[int] = field(default_factory=list)
    """Jobs still discarded, because another unfinished job has their unique key."""
    left: dict[int, Reason] = field(default_factory=dict)
    """For the other given ids: the reason why the job was left as it is."""
    unfinished: dict[str, int] = field(default_factory=dict)
    """If the filter selected nothing: the unfinished jobs of its type, group and
    origin, by state, counted up to 1,000."""


def retry(
    database: Database,
    ids: Iterable[int] | None = None,
    filter: Filter | None = None,
    *,
    batch: int = BATCH,
    stale_after: float = 5.0,
) -> Retried:
    """Let jobs run as soon as a worker is free: discarded ones and those in backoff.

    A job keeps its id, and with it its idempotency key, its errors and its place in its
    group. A job in backoff keeps its count of attempts; for a discarded job the count
    starts again. A job that is delayed or snoozed and has not failed is retried only by
    its id; a job that waits for a rate limit never is.

    Args:
        database: where the jobs are.
        ids: the jobs. Defaults to all that the filter selects.
        filter: selects among them. ``error`` and ``since`` are the last failure's.
            Defaults to all.
        batch: jobs in one transaction. If a later transaction fails, the earlier ones
            stay done; call again to go on.
        stale_after: seconds without a heartbeat until a process counts as dead, the
            setting of that name; used only for the reasons.

    Raises:
        OperatingError: ``batch`` is below 1, or locks could not be taken within five
            seconds.
    """
    if batch < 1:
        raise OperatingError(f"a batch has 1 job or more, not {batch}")
    chosen = filter or Filter()
    asked = None if ids is None else sorted(set(ids))
    done, seen = Retried(), set()
    for job, moved in move_discarded(database, asked, chosen, batch=batch):
        done.retried += moved
        if not moved:
            done.conflicts.append(job)
        if asked is not None:
            seen.add(job)
    for rows in _bring_forward(database, asked, chosen, batch, done.retried):
        done.retried += len(rows)
        if asked is not None:
            seen.update(rows)
    if asked is not None:
        for job in asked:
            if job not in seen:
                done.left[job] = _find_reason(database, job, chosen, stale_after)
    elif not done.retried and not done.conflicts:
        done.unfinished = _count_unfinished(database, chosen)
    return done


def _bring_forward(
    database: Database,
    ids: list[int] | None,
    filter: Filter,
    batch: int,
    changed: int,
) -> Iterator[list[int]]:
    """Make scheduled jobs due, a transaction for each batch; yields the ids of each."""
    with database.connect("retry") as connection:
        so_far = describe_batches(changed)
        now = read_time(connection, database, so_far=so_far)
        values = {
            **asdict(filter),
            # A job that fails again meanwhile is not taken a second time.
            "until": now,
            "limit": batch,
        }
        run = _Run(connection, database, values, changed)
        if ids is None:
            yield from run.take_filtered()
        else:
            yield from run.take(ids)


@dataclass(slots=True)
class _Run:
    """One retry on one connection."""

    connection: psycopg.Connection[Any]
    database: Database
    values: dict[str, Any]
    changed: int
    """How many jobs earlier batches have changed."""

    def take(self, ids: list[int]) -> Iterator[list[int]]:
        """Take the jobs with these ids, whether they have failed or not."""
        batch = self.values["limit"]
        for start in range(0, len(ids), batch):
            some = {"ids": ids[start : start + batch], "put_off": _LIMITED}
            rows = self._execute("retry_ids", by_id=True, **some)
            self.changed += len(rows)
            yield [job for job, _ in rows]

    def take_filtered(self) -> Iterator[list[int]]:
        """Take the jobs that have failed and fit the filter, origin by origin."""
        for (origin,) in self._execute("list_origins"):
            if self.values["origin"] not in (None, origin):
                continue
            due_from, full = self.values["until"], True
            while full:
                rows = self._execute(
                    "retry_scheduled",
                    of=origin,
                    due_from=due_from,
                    by_id=False,
                    put_off=[*_LIMITED, Snooze.__name__],
                )
                self.changed += len(rows)
                yield [job for job, _ in rows]
                due_from = max((at for _, at in rows), default=due_from)
                full = len(rows) == self.values["limit"]

    def _execute(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        so_far = describe_batches(self.changed)
        with bounded(self.connection, self.database, so_far=so_far):
            return self.connection.execute(
                self.database.queries[query], {**self.values, **values}
            ).fetchall()


def _find_reason(
    database: Database, job: int, filter: Filter, stale_after: float
) -> Reason:
    try:
        found = explain(database, job, stale_after=stale_after)
    except OperatingError as error:
        # The others are retried, and the caller has to learn that.
        return Reason("unknown", f"why is not known: {error}")
    return _choose_reason(found, filter)


def _choose_reason(found: Explanation, filter: Filter) -> Reason:
    first = found.reasons[0]
    if filter and first.code in ("scheduled", "discarded"):
        return Reason("filtered", f"the filter excludes it: {first.text}")
    return first


def _count_unfinished(database: Database, filter: Filter) -> dict[str, int]:
    plain = replace(filter, error=None, since=None)
    return dict(
        Counter(job.state for job in list_jobs(database, None, plain, limit=LIMIT))
    )
