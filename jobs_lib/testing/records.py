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
    version: int | None = None,
) -> Record:
    """A record as a handler gets it: with its value decoded; None for a tombstone.

    The version of a state stands in its header ``ce_version``, as a relay writes it.
    """
    given = {} if version is None else {"ce_version": str(version)}
    return Record(
        topic,
        partition,
        offset,
        key,
        value,
        given | dict(headers or {}),
        timestamp or datetime.now(UTC),
    )
