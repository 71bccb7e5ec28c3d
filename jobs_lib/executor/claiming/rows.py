"""The columns of the rows that the claim's statements return.

The statements are in ``jobs_lib/sql``; a test checks that their select lists have these
names, in this order. A row that is a job becomes no such object: the loop that reads
it, in ``found.py``, unpacks the same columns in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from datetime import datetime

(
    JOB, WINDOW, PASSED, UNKNOWN, WAITING, SKIPPED, NEWER, FOREIGN, ENDS, BEHIND, FULL,
    CLOSED,
) = range(12)  # fmt: skip
"""The kinds of row of a claim:

- ``JOB``: a job, which this claim takes.
- ``WINDOW``: how far a window went, and how many rows it held.
- ``PASSED``: a row was passed over, because its group is in flight.
- ``UNKNOWN``: jobs of a type that no app knows.
- ``WAITING``: a suspect, which waits for its turn.
- ``SKIPPED``: an origin that somebody had locked, or that is not ours any more.
- ``NEWER``: the next job of its type behind a lane that begins with a last-only job.
- ``FOREIGN``: a group goes on with a type of another section or app.
- ``ENDS``: the same, behind a lane of this claim.
- ``BEHIND``: a group was passed over, because others may have its head in flight.
- ``FULL``: a job was passed over only because of its value.
- ``CLOSED``: jobs of a partition were passed over, because its gate is closed.
"""


class ClaimRow(NamedTuple):
    """A row of ``claim`` or ``claim_plain``; values without a meaning are None."""

    kind: int
    origin: str
    id: int
    """Of a window: the highest id in it; None if no row of it counts. Of a closed gate:
    the highest offset."""
    type: str
    group: str | None
    attempt: int
    """Failed attempts of a job."""
    crashes: int
    """Of a closed gate: the number of the partition."""
    priority: int
    payload: str | None
    """None for a payload that is read when the job starts."""
    run_at: datetime | None
    enqueued: float
    """Seconds since 1970."""
    headers: dict[str, str] | None
    cut: bool
    """Whether the lane may go on behind the rows that were read."""
    delayed_or_placed: bool
    """Of a job that runs last only: whether it is still waiting for its time. Of
    others: whether they may have places of records, which the jobs that they enqueue
    get."""
    age: float | None
    """Of a job that runs last only: seconds since its enqueue."""
    place: str
    """The place of the row, as PostgreSQL's ctid. If its type waits for other groups,
    its own record stands before it, as ``partition:offset``."""
    value: str | None = None
    """The job's value if a limit counts by value; other claims have no such column."""

    @property
    def rows(self) -> int:
        """Of an unknown type: how many rows there were."""
        return self.attempt


class JumpRow(NamedTuple):
    """The row of ``jump``."""

    ids: list[int]
    """The jobs that may be claimed, in the order of their ids."""
    furthest: int | None
    """The highest id seen; None if there is no row."""
    seen: int
    """How many rows were looked at."""
    full_ids: list[int]
    """The jobs passed over only because of their value,"""
    full_values: list[str]
    """and those values."""
    closed_sources: list[int]
    """Partitions, by their numbers, whose gate is closed for some of the jobs,"""
    closed_offsets: list[int]
    """and the highest offset of their records."""


class HorizonRow(NamedTuple):
    """The row of ``horizon``: which transactions are open."""

    oldest: int
    """The oldest transaction that is still open."""
    following: int
    """The first transaction id that is not given out yet."""
    running: list[int]
    """The transactions that are open."""


Due: TypeAlias = "tuple[str, int, str | None, str]"
"""A row of ``promote``, a job that is due: origin, id, group and type."""
