"""List the owners of origins, and the work in each origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs_lib.kafka.places import read_ends
from jobs_lib.operating.session import bounded

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings

COUNTED = 10_000
"""The count of an origin's jobs or rows stops at this number."""
_CONSUME = "consume:"


@dataclass(frozen=True, slots=True)
class Owned:
    """One origin in one role."""

    role: str
    """``execute`` or ``execute:<app>``, ``relay``, or ``consume:<group>``."""
    origin: str
    pod: str | None
    """None if it has no owner."""
    owner: UUID | None
    """The process that owns it."""
    epoch: int
    """How often it was taken over."""
    since: datetime
    """When it was taken or released."""
    heartbeat: datetime | None
    """The owner's last heartbeat."""
    waiting: int | None
    """Unfinished jobs, or rows of the outbox: :data:`COUNTED` at most."""
    claimed: int | None
    """Jobs that the owner has claimed: they run, or are next."""
    lag: int | None
    """Records that the group has not applied; None if Kafka does not say."""
    failed_offset: int | None
    """The record at which a consumer's partition stands still; None if it does not."""
    failing_since: datetime | None
    """When that record failed first."""
    failure: str | None
    """Why, as the log says it: without values of records."""


def list_owners(database: Database, settings: Settings) -> list[Owned]:
    """List all origins that any process has ever wanted, in order.

    Args:
        database: where the origins are.
        settings: where Kafka is, which knows the lag of consumers.

    Raises:
        UnavailableError: the database or Kafka does not answer.
    """
    with database.connect("owners") as connection, bounded(connection, database):
        rows = connection.execute(
            database.queries["list_owners"], {"limit": COUNTED}
        ).fetchall()
    consumed = {str(row[1]) for row in rows if row[0].startswith(_CONSUME)}
    ends: dict[str, int] = {}
    if consumed and settings.kafka_bootstrap_servers:
        ends = read_ends(settings, consumed)
    found = []
    for row in rows:
        # The offset gives the lag; the other columns are the fields, in their order.
        lag = _lag(row[0], row[1], row[9], ends)
        found.append(Owned(*[*row[:9], lag, *row[10:]]))
    return found


def _lag(
    role: str, origin: str, following: int | None, ends: dict[str, int]
) -> int | None:
    if not role.startswith(_CONSUME) or origin not in ends:
        return None
    return max(0, ends[origin] - (following or 0))
