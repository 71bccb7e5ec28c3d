"""Records for tests, without a broker."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from jobs_lib.consuming.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping


def make_record(
    value: Any,
    *,
    key: str | None = None,
    topic: str = "test",
    partition: int = 0,
    offset: int = 0,
    headers: Mapping[str, str] | None = None,
    timestamp: datetime | None = None,
) -> Record:
    """A record as a handler gets it: with its value decoded; None for a tombstone."""
    return Record(
        topic,
        partition,
        offset,
        key,
        value,
        dict(headers or {}),
        timestamp or datetime.now(UTC),
    )
