"""Records for tests, without a broker."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from jobs_lib.consuming.record import build_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs_lib.consuming.record import Record


def make_record(
    value: Any,
    *,
    key: Any = None,
    topic: str = "test",
    partition: int = 0,
    offset: int = 0,
    headers: Mapping[str, str] | None = None,
    timestamp: datetime | None = None,
    version: int | None = None,
    cause: str | None = None,
    repeated: bool = False,
) -> Record[Any, Any]:
    """A record as a handler gets it: with its value decoded; None for a tombstone.

    The version of a state stands in its header ``ce_version``, and its cause in
    ``ce_cause``, as a relay writes them. Without a time it is written now; give one to
    make the same record twice, with the same ``idempotency_key``.
    """
    given = {"ce_version": version, "ce_cause": cause}
    written = {name: str(text) for name, text in given.items() if text is not None}
    return build_record(
        topic,
        partition,
        offset,
        key,
        value,
        written | dict(headers or {}),
        timestamp or datetime.now(UTC),
        repeated,
    )
