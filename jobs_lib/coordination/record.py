"""A record, as a handler of the coordinated consumer gets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from jobs_lib.kafka.timestamps import read_timestamp

if TYPE_CHECKING:
    from collections.abc import Sequence
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


def count_bytes(messages: Sequence[Message]) -> int:
    """Count the bytes that messages keep, about."""
    keys = [one.key() for one in messages]
    # The length of a message is that of its value.
    return sum(map(len, messages)) + sum(map(len, filter(None, keys))) + 200 * len(keys)
