"""The time of a message, as Kafka gives it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from confluent_kafka import Message

LATEST_MS = 253_402_300_799_999
"""The last millisecond of the year 9999, which is the last one that Python knows."""


def read_milliseconds(message: Message) -> int:
    """Get a message's time in milliseconds since 1970, which PostgreSQL can store.

    A producer may write any number: the year 9999 is last.
    """
    return min(max(message.timestamp()[1], 0), LATEST_MS)


def read_timestamp(message: Message) -> datetime:
    """Get a message's time, within the same bounds."""
    return datetime.fromtimestamp(read_milliseconds(message) / 1000, UTC)
