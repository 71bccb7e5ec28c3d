"""A record, as a handler of the coordinated consumer gets it.

Most handlers look at few of its parts. So it reads a part from Kafka's message when it
is asked for it: the time alone costs more than all else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jobs_lib.kafka.headers import list_headers
from jobs_lib.kafka.timestamps import read_timestamp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from confluent_kafka import Message

Headers = tuple[tuple[str, bytes | None], ...]


class Record:
    """One record of a topic, with its bytes as they are."""

    __slots__ = ("_message",)
    __match_args__ = (
        "topic", "partition", "offset", "key", "value", "headers", "timestamp"
    )  # fmt: skip

    def __init__(self, message: Message) -> None:
        """Wrap Kafka's message."""
        self._message: Any = message

    @property
    def topic(self) -> str:
        """The topic's name in Kafka."""
        return self._message.topic() or ""

    @property
    def partition(self) -> int:
        """The number of the partition."""
        return self._message.partition() or 0

    @property
    def offset(self) -> int:
        """Its place in the partition."""
        return self._message.offset() or 0

    @property
    def key(self) -> bytes | None:
        """The key's bytes; None if it has none."""
        return cast("bytes | None", self._message.key())

    @property
    def value(self) -> bytes | None:
        """The value's bytes; None for a tombstone."""
        return cast("bytes | None", self._message.value())

    @property
    def headers(self) -> Headers:
        """In their order; a name may be repeated.

        Raises:
            RecordError: one has a name that is not UTF-8.
        """
        return cast("Headers", tuple(list_headers(self._message)))

    @property
    def timestamp(self) -> datetime:
        """When it was written, in UTC, as the topic is set up."""
        return read_timestamp(self._message)

    def __repr__(self) -> str:
        shown = ("topic", "partition", "offset", "timestamp")
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"Record({fields})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return _list_parts(self) == _list_parts(other)

    def __hash__(self) -> int:
        return hash(_list_parts(self))

    def __reduce__(self) -> Any:
        # Kafka's message cannot be pickled, nor copied.
        message = self._message
        parts = (*_list_parts(self)[:-1], message.timestamp())
        return _build, parts


class _Copied(NamedTuple):
    """Stands for Kafka's message in a record that was copied."""

    parts: tuple[Any, ...]

    def topic(self) -> Any:
        return self.parts[0]

    def partition(self) -> Any:
        return self.parts[1]

    def offset(self) -> Any:
        return self.parts[2]

    def key(self) -> Any:
        return self.parts[3]

    def value(self) -> Any:
        return self.parts[4]

    def headers(self) -> Any:
        return self.parts[5]

    def timestamp(self) -> Any:
        return self.parts[6]


def _build(*parts: Any) -> Record:
    return Record(cast("Any", _Copied(parts)))


def _list_parts(record: Record) -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in Record.__match_args__)


def count_bytes(messages: Sequence[Message]) -> int:
    """Count the bytes that messages keep, about."""
    keys = [one.key() for one in messages]
    # The length of a message is that of its value.
    return sum(map(len, messages)) + sum(map(len, filter(None, keys))) + 200 * len(keys)
