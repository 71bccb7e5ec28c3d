"""Explain why a job does not run: every reason that holds now, the nearest first."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib.jobs.job import RateLimited
from jobs_lib.operating.gates import explain_wait
from jobs_lib.operating.session import bounded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from uuid import UUID

    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings

_COUNTED = 10_000
_Asked = tuple[tuple[str, str], tuple[int, int]]
"""A topic and a group, and the partition and the offset of a record."""
_Waits = dict[_Asked, str | None]
"""What records lack of groups, as :func:`explain_wait` says it."""
_LIMITED = f"{RateLimited.__name__}: "
"""The beginning of the last error of a job that waits for a rate limit."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason why a job does not run, or what became of the job."""

    code: str
    """``running``, ``cancel_requested``, ``paused``, ``scheduled``, ``rate_limited``,
    ``behind``, ``workers_busy``, ``limited``, ``gated``, ``unknown_type``,
    ``no_owner``, ``stale_owner``, ``ready``, ``discarded``, ``finished``, ``gone`` or
    ``never_existed``; of a retry also ``filtered`` or ``unknown``."""
    text: str
    """The reason as a sentence, with the values."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job does not run."""

    job: int
    reasons: list[Reason] = field(default_factory=list)
    head: Explanation | None = None
    """The explanation of the job that this one waits behind in its group."""
    places: list[str] = field(default_factory=list)
    """The records that are not done before this job is, each as a sentence."""

    @property
    def codes(self) -> list[str]:
        """The codes of the reasons, the nearest first."""
        return [reason.code for reason in self.reasons]


@dataclass(frozen=True, slots=True)
class _Facts:
    id: int
    origin: str
    type: str
    group: str | None
    state: str
    attempt: int
    run_at: datetime | None
    due_in: float | None
    error: str | None
    claimed_at: datetime | None
    cancel_requested_at: datetime | None
    owner: UUID | None
    epoch: int | None
    pod: str | None
    silent: float | None
    types: list[str] | None
    beaten_at: datetime | None
    busy: list[dict[str, Any]] | None

    def owned_by(self) -> str:
        return f"pod {self.pod} (process {self.owner}) at epoch {self.epoch}"


def explain(
    database: Database,
    job: int,
    *,
    stale_after: float = 5.0,
    settings: Settings | None = None,
) -> Explanation:
    """Explain why a job does not run, or what became of it.

    Args:
        database: where the job is.
        job: its id.
        stale_after: seconds without a heartbeat until a process counts as dead, the
            setting of that name.
        settings: say where Kafka is, which is asked how far the groups are that a job
            waits for. Without them these are only named.

    Raises:
        OperatingError: the queries took longer than ten seconds.
    """
    waits: _Waits = {}
    with database.connect("explain") as connection:
        while True:
            one = _Explainer(connection, database, stale_after, settings, waits)
            with bounded(connection, database):
                found = one.explain(job)
            if settings is None or not one.unasked:
                return found
            # Kafka may be slow, and the server ends a transaction that stands still.
            for asked in one.unasked:
                waits[asked] = explain_wait(settings, *asked)


class _Explainer:
    """Explains one job, over one connection in one transaction."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        database: Database,
        stale_after: float,
        settings: Settings | None,
        waits: _Waits,
    ) -> None:
        self._settings = settings
        self._waits_of = waits
        self.unasked: list[_Asked] = []
        """What Kafka has to be asked before the explanation is complete."""
        self._connection = connection
        self._database = database
        self._stale_after = stale_after

    def explain(self, job: int) -> Explanation:
        found = self._explain(job)
        rows = self._all("explain_places", id=job)
        return replace(found, places=[_place(*row) for row in rows])

    def _explain(self, job: int) -> Explanation:
        row = self._one("explain_job", id=job)
        if row is None:
            return Explanation(job, [self._ended(job)])
        facts = _Facts(*row)
        if facts.claimed_at is not None and not self._is_stale(facts):
            waits = [] if _is_reported_running(facts) else self._waits(facts)
            return Explanation(job, [*_running(facts), *waits])
        reasons = [*self._pauses(facts), *_schedule(facts)]
        head = self._head(facts)
        if head is not None:
            reasons.append(_behind(facts, *head))
        reasons += self._type(facts)
        if head is None:
            # The head's explanation covers the owner: both have the same origin.
            reasons += self._owner(facts)
        if not reasons:
            reasons += self._waits(facts)
        if not reasons:
            reasons.append(self._ready(facts))
        return Explanation(job, reasons, self.explain(head[0]) if head else None)

    def _pauses(self, facts: _Facts) -> Iterator[Reason]:
        values = {"type": facts.type, "origin": facts.origin, "group": facts.group}
        for kind, name, since in self._all("explain_pauses", **values):
            yield Reason(
                "paused",
                f"{kind} {name!r} is paused since {_time(since)}: "
                f"`jobs-lib jobs resume {kind} {shlex.quote(name)}`",
            )

    def _head(self, facts: _Facts) -> tuple[int, int] | None:
        if facts.group is None:
            return None
        row = self._one(
            "explain_head",
            origin=facts.origin,
            group=facts.group,
            id=facts.id,
            limit=_COUNTED,
        )
        return None if row is None or not row[1] else (row[0], row[1])

    def _type(self, facts: _Facts) -> Iterator[Reason]:
        live, knowing, pods = self._one(
            "explain_type", type=facts.type, stale_after=self._stale_after
        ) or (0, 0, [])
        if live and not knowing:
            yield Reason(
                "unknown_type",
                f"none of the {live} live processes that run jobs knows the type "
                f"{facts.type!r}: deploy the release that has its handler",
            )
        elif (
            facts.owner is not None
            and facts.types is not None
            and not self._is_stale(facts)
            and facts.type not in facts.types
        ):
            yield Reason(
                "unknown_type",
                f"the owner of {facts.origin}, {facts.owned_by()}, does not know the "
                f"type {facts.type!r}; known on: {', '.join(pods) or 'no other pod'}",
            )

    def _waits(self, facts: _Facts) -> list[Reason]:
        """The reasons that its owner published with its last heartbeat."""
        found = []
        for item in facts.busy or []:
            if "workers" in item:
                found.append(_busy(facts, item))
            elif "after" in item:
                found += self._gated(facts, item)
            elif reason := self._limited(facts, item):
                found.append(reason)
        return found

    def _gated(self, facts: _Facts, item: dict[str, Any]) -> Iterator[Reason]:
        """What the gate of its record waits for."""
        row = self._one("explain_record", origin=facts.origin, id=facts.id)
        if row is None:
            return
        topic, partition, offset = row
        for after_topic, group, is_known in item["after"]:
            if after_topic != topic:
                continue
            asked = (after_topic, group), (partition, offset)
            if not is_known:
                text = (
                    f"Kafka does not say to pod {facts.pod} how far the group "
                    f"{group!r} is in {topic!r}"
                )
            elif self._settings is None:
                text = f"the group {group!r} has to pass {topic}/{partition} {offset}"
            elif asked not in self._waits_of:
                self.unasked.append(asked)
                continue
            elif wait := self._waits_of[asked]:
                text = wait
            else:
                continue
            yield Reason(
                "gated",
                f"it comes from the record at {topic}/{partition} offset {offset}, and "
                f"waits until others have handled that: {text}",
            )

    def _limited(self, facts: _Facts, item: dict[str, Any]) -> Reason | None:
        most, parameter = item["limit"], item["parameter"]
        each = f" for each {parameter}" if parameter else ""
        told = f"{facts.type!r} runs {most:,} at once{each} over all pods"
        try:
            pods = self._find_slots(facts, item["type"], parameter)
        except psycopg.errors.InsufficientPrivilege:
            return Reason(
                "limited",
                f"{told}: whether that many run is not known to this role, which may "
                "not read the payload",
            )
        if len(pods) < most:
            return None
        on = ", ".join(sorted({*pods}))
        return Reason("limited", f"{told}, and that many run: on {on}")

    def _find_slots(
        self, facts: _Facts, type_name: str, parameter: str | None
    ) -> list[str]:
        """The pods with jobs that count for the same limit, a pod for each job."""
        if parameter is None:
            row = self._one("explain_limit", type=type_name)
        else:
            with self._connection.transaction():  # only this may be refused
                row = self._one(
                    "explain_limit_of",
                    type=type_name,
                    field=parameter,
                    origin=facts.origin,
                    id=facts.id,
                )
        return (row and row[0]) or []

    def _owner(self, facts: _Facts) -> Iterator[Reason]:
        if facts.owner is None:
            yield Reason(
                "no_owner",
                f"no process owns its origin {facts.origin}: does an executor run "
                "whose service reads that topic, and does the topic have that "
                "partition?",
            )
        elif facts.silent is None:
            yield Reason(
                "stale_owner",
                f"the owner of its origin {facts.origin}, process {facts.owner} at "
                f"epoch {facts.epoch}, is gone, and no other has taken over",
            )
        elif self._is_stale(facts):
            yield Reason(
                "stale_owner",
                f"the owner of its origin {facts.origin}, {facts.owned_by()}, has been "
                f"silent for {facts.silent:.0f} s, and no other has taken over",
            )

    def _ready(self, facts: _Facts) -> Reason:
        (ahead,) = self._one(
            "explain_ahead", origin=facts.origin, id=facts.id, limit=_COUNTED
        ) or (0,)
        count = f"{ahead:,}" if ahead < _COUNTED else f"{_COUNTED:,} or more"
        return Reason(
            "ready",
            f"nothing keeps it: {facts.owned_by()} owns its origin {facts.origin} and "
            f"will claim it; {count} jobs lie before it there",
        )

    def _ended(self, job: int) -> Reason:
        row = self._one("explain_ended", id=job)
        if row is not None:
            outcome, at, attempt, error = row
            if outcome == "discarded" and error is not None:
                return Reason(
                    "discarded",
                    f"discarded at {_time(at)} after {attempt} attempts, the last "
                    f"error was: {error}. `jobs-lib jobs retry {job}` runs it again",
                )
            return Reason(
                "finished", f"{outcome} at {_time(at)}, attempts in all: {attempt}"
            )
        (last,) = self._one("last_id", schema=self._database.schema) or (0,)
        if 0 < job <= last:
            return Reason(
                "gone",
                "no table has it: it finished and the history no longer keeps it, or "
                "it was deleted, or the transaction that enqueued it rolled back or is "
                "still open",
            )
        return Reason("never_existed", f"it never existed: the latest job is {last}")

    def _is_stale(self, facts: _Facts) -> bool:
        return facts.silent is None or facts.silent > self._stale_after

    def _one(self, query: str, **values: object) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._connection.execute(
            self._database.queries[query], values
        ).fetchone()
        return row

    def _all(self, query: str, **values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(
            self._database.queries[query], values
        ).fetchall()


def _running(facts: _Facts) -> Iterator[Reason]:
    yield Reason(
        "running",
        f"claimed at {_time(facts.claimed_at)} by {facts.owned_by()}: it runs, or is "
        "next there",
    )
    if facts.cancel_requested_at is not None:
        yield Reason(
            "cancel_requested",
            f"it was asked to stop at {_time(facts.cancel_requested_at)}",
        )


def _is_reported_running(facts: _Facts) -> bool:
    reported = (job for item in facts.busy or [] for job in item.get("jobs", ()))
    return any(job["id"] == facts.id for job in reported)


def _busy(facts: _Facts, item: dict[str, Any]) -> Reason:
    jobs = []
    for job in item["jobs"]:
        since = facts.beaten_at and facts.beaten_at - timedelta(seconds=job["seconds"])
        jobs.append(f"job {job['id']} ({job['type']}) since {_time(since)}")
    more = item["workers"] - len(jobs)
    if more > 0 and jobs:
        jobs.append(f"{more:,} more")
    return Reason(
        "workers_busy",
        f"all {item['workers']:,} workers of pod {facts.pod} that it could run on are "
        f"busy with {', '.join(jobs) or 'jobs that end quickly'}",
    )


def _behind(facts: _Facts, first: int, before: int) -> Reason:
    count = f"{before:,}" if before < _COUNTED else f"{_COUNTED:,} or more"
    return Reason(
        "behind",
        f"behind job {first}, the head of its group {facts.group!r}; unfinished jobs "
        f"of the group before it: {count}",
    )


def _schedule(facts: _Facts) -> Iterator[Reason]:
    if facts.state != "scheduled" or facts.due_in is None or facts.due_in <= 0:
        return
    due = f"{_time(facts.run_at)}, in {facts.due_in:,.0f} s"
    error = facts.error or ""
    if error.startswith(_LIMITED):
        why = error.removeprefix(_LIMITED)
        yield Reason("rate_limited", f"rate limited until {due}: {why}")
    elif facts.attempt:
        yield Reason(
            "scheduled",
            f"not due until {due}; it has failed {facts.attempt} times, the last error "
            f"was: {facts.error}",
        )
    elif facts.error:
        yield Reason("scheduled", f"not due until {due}; put off by: {facts.error}")
    else:
        yield Reason("scheduled", f"not due until {due}")


def _place(group: str, topic: str, partition: int, offset: int) -> str:
    return (
        f"comes from the record at {topic}/{partition} offset {offset}: until it is "
        f"done, {group} is not done with that record"
    )


def _time(at: datetime | None) -> str:
    return "an unknown time" if at is None else at.isoformat(" ", "seconds")
