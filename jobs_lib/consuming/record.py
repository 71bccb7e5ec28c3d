"""A record, as handlers get it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, cast

from typing_extensions import TypeVar

from jobs_lib.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import Message

_LATEST_MS = 253_402_300_799_999
"""The last millisecond of the year 9999, which is the last one that Python knows."""
_DIGITS = 19
"""Digits of the largest version: the relay writes a bigint."""

V_co = TypeVar("V_co", covariant=True, default=Any)


@dataclass(frozen=True, slots=True)
class Record(Generic[V_co]):
    """One record of a topic, whose value has the type that the consumer declares.

    If the topic has tombstones, a handler of ``value=T`` gets a ``Record[T | None]``.
    """

    topic: str
    partition: int
    offset: int
    key: str | None
    value: V_co = field(repr=False)
    """Decoded as the consumer declares; None for a tombstone."""
    headers: dict[str, str] = field(repr=False)
    timestamp: datetime

    @property
    def origin(self) -> str:
        """The partition as ``topic/partition``."""
        return f"{self.topic}/{self.partition}"

    @property
    def version(self) -> int | None:
        """The version that the relay wrote into the headers, if there is one."""
        text = self.headers.get("ce_version", "")
        return int(text) if len(text) <= _DIGITS and text.isdecimal() else None


def read_headers(message: Message) -> dict[str, str]:
    """Read the headers as text; if a name is repeated, the last one counts."""
    return {
        name: value.decode("utf-8", "replace")
        if isinstance(value, bytes)
        else str(value or "")
        for name, value in cast("Iterable[tuple[str, object]]", message.headers() or ())
    }


def make_record(message: Message, value: Any) -> Record[Any]:
    """Make the record of a message whose value is already decoded.

    Raises:
        RecordError: its key is no text.
    """
    return Record(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        _read_key(message),
        value,
        read_headers(message),
        read_timestamp(message),
    )


def read_timestamp(message: Message) -> datetime:
    """Get a message's time. A producer may write any number: the year 9999 is last."""
    milliseconds = min(max(message.timestamp()[1], 0), _LATEST_MS)
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def describe(message: Message) -> str:
    """Name a message's place, for people to read."""
    return f"{message.topic()}/{message.partition()} offset {message.offset()}"


def _read_key(message: Message) -> str | None:
    key = message.key()
    try:
        return key.decode() if isinstance(key, bytes) else key
    except UnicodeDecodeError:
        raise RecordError(
            f"the record at {describe(message)} cannot be read: its key is not UTF-8"
        ) from None
