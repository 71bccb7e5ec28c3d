"""A record, as a handler of the coordinated consumer gets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from jobs_lib.kafka.timestamps import read_timestamp

if TYPE_CHECKING:
    from datetime import datetime

    from confluent_kafka import Message


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a topic, with its bytes as they are."""

    topic: str
    partition: int
    offset: int
    """Its place in the partition."""
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    """None for a tombstone."""
    headers: tuple[tuple[str, bytes | None], ...] = field(repr=False)
    """In their order; a name may be repeated."""
    timestamp: datetime
    """When it was written, in UTC, as the topic is set up."""


def make_record(message: Message) -> Record:
    """Make the record of Kafka's message."""
    return Record(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        message.key(),
        message.value(),
        tuple(cast("Any", message.headers() or ())),
        read_timestamp(message),
    )


def count_bytes(message: Message) -> int:
    """Count the bytes that a message keeps, about."""
    return len(message.key() or b"") + len(message.value() or b"") + 200
