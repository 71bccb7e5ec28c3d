"""An event before it is sent, and the answer when Kafka has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(slots=True)  # a frozen one takes twice the time to make
class Event:
    """An event of a stream, checked and encoded.

    Attributes:
        topic: the stream's name in Kafka.
        key: of the entity.
        value: the encoded value; None for a tombstone.
        content: the value in plain types; None for a tombstone.
        headers: of the record.
    """

    topic: str
    key: str
    # What it carries must not stand in any log.
    value: bytes | None = field(repr=False)
    content: Any = field(repr=False)
    headers: list[tuple[str, str | bytes | None]] = field(repr=False)


class Place(NamedTuple):
    """Where Kafka has put an event.

    Attributes:
        partition: the number of the partition.
        offset: in the partition; None with ``acks=0``, when Kafka does not say it.
    """

    partition: int
    offset: int | None


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a publish: Kafka has the event, or it would change nothing.

    Attributes:
        topic: the stream's name in Kafka.
        partition: where the event is; None if none was sent.
        offset: where it is in the partition; None if none was sent, and with
            ``acks=0``.
        key: of the entity.
        content: the value as the event has it, in plain types and without the stream's
            internal fields. None: the entity is deleted.
        changed: False if the table says already what the event would say, so that none
            was sent.
    """

    topic: str
    partition: int | None
    offset: int | None
    key: str
    content: Any = field(repr=False)
    changed: bool
