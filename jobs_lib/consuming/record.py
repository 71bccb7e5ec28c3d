"""A record, as handlers get it.

Most handlers look at few of a record's parts. So a record reads a part from Kafka's
message when it is asked for it: headers and times cost more than all else.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Generic
from uuid import UUID, uuid5

from typing_extensions import TypeVar

from jobs_lib.errors import RecordError
from jobs_lib.kafka.headers import hide_headers, list_headers
from jobs_lib.kafka.timestamps import read_timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from confluent_kafka import Message

_NAMESPACE = UUID("4b9e1f2c-6a53-4d0e-9f57-0c6e2a8b71d4")
"""Never to be changed: all idempotency keys follow from it."""
_VERSION = "ce_version"
_CAUSE = "ce_cause"
REEXPORT = "reexport"
"""The cause of records that stand for a key of a table, and for no change of it."""
_MOST_VERSION = 2**63 - 1
"""The largest version: the relay writes a bigint."""
_DIGITS = 19
"""Its digits."""

V_co = TypeVar("V_co", covariant=True, default=Any)
K_co = TypeVar("K_co", covariant=True, default=str)


class Record(Generic[V_co, K_co]):
    """One record of a topic, whose value and key have the types that are declared.

    If the topic has tombstones, a handler of ``value=T`` gets a ``Record[T | None]``.
    With ``key_type=int`` it gets a ``Record[T, int]``.
    """

    __slots__ = ("_headers", "_highest", "_key", "_message", "_timestamp", "_value")
    __match_args__ = (
        "topic", "partition", "offset", "key", "value", "headers", "timestamp"
    )  # fmt: skip

    def __init__(
        self, message: Message | Given, key: Any, value: Any, highest: int | None
    ) -> None:
        """Wrap a message.

        Args:
            message: Kafka's.
            key: of the message, already decoded.
            value: of the message, already decoded.
            highest: the highest offset to go on from that the partition ever had.
        """
        self._message: Message | Any = message
        self._key: K_co | None = key
        self._value: V_co = value
        self._highest = highest
        self._headers: dict[str, str] | None = None
        self._timestamp: datetime | None = None

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
        """The record's place in its partition."""
        return self._message.offset() or 0

    @property
    def key(self) -> K_co | None:
        """Decoded as the consumer declares; None if the record has none."""
        return self._key

    @property
    def value(self) -> V_co:
        """Decoded as the consumer declares; None for a tombstone."""
        return self._value

    @property
    def headers(self) -> dict[str, str]:
        """The headers as text; if a name is repeated, the last one counts."""
        if self._headers is None:
            self._headers = read_headers(self._message)
        return self._headers

    @property
    def timestamp(self) -> datetime:
        """When the record was written, in UTC, as the topic is set up."""
        if self._timestamp is None:
            self._timestamp = read_timestamp(self._message)
        return self._timestamp

    @property
    def origin(self) -> str:
        """The partition as ``topic/partition``."""
        return f"{self.topic}/{self.partition}"

    @property
    def version(self) -> int | None:
        """The version that the relay wrote into the headers, if there is one.

        None, too, if the header is no whole number of up to 19 digits.
        """
        if self._headers is None:
            return read_version(self._message)
        return _as_version(self._headers.get(_VERSION, "").encode())

    @property
    def cause(self) -> str | None:
        """Why the relay sent the record: ``live`` or ``reexport``; None if unknown."""
        return self._read(_CAUSE)

    @property
    def idempotency_key(self) -> str:
        """The same whenever this event is handled, for effects elsewhere.

        It follows from the request by which the event was published, also if it is in
        the topic twice. Else it follows from the id that the sender gave it as a
        CloudEvent, and else from its place and its time: a topic that was made anew
        has other events at the same places.
        """
        if (request := self._read("ce_request")) is not None:
            known: list[Any] = ["request", request]
        elif (id_ := self._read("ce_id")) is not None:
            known = ["event", self._read("ce_source"), id_]
        else:
            milliseconds = round(self.timestamp.timestamp() * 1000)
            known = ["place", self.partition, self.offset, milliseconds]
        return str(uuid5(_NAMESPACE, json.dumps([self.topic, *known])))

    def ensure_may_publish(self) -> None:
        """Let the handler of the record publish events."""

    @property
    def repeated(self) -> bool:
        """Whether the group has handled this place of the partition before.

        That is so below the highest offset that it ever had: its offset was set back.
        """
        return self._highest is not None and self.offset < self._highest

    def _read(self, name: str) -> str | None:
        """Read one header, without the text of all others."""
        if self._headers is None:
            return read_header(self._message, name)
        return self._headers.get(name)

    def __repr__(self) -> str:
        shown = ("topic", "partition", "offset", "key", "timestamp")
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"Record({fields})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return _list_parts(self) == _list_parts(other)

    __hash__ = None  # type: ignore[assignment] # its headers are a dict

    def __reduce__(self) -> Any:
        # Kafka's message cannot be pickled, nor copied.
        return build_record, (*_list_parts(self), self.repeated)


class Given:
    """Stands for Kafka's message in a record that was made without Kafka."""

    __slots__ = ("_place",)

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        self._place = (topic, partition, offset)

    def topic(self) -> str:
        """See the record."""
        return self._place[0]

    def partition(self) -> int:
        """See the record."""
        return self._place[1]

    def offset(self) -> int:
        """See the record."""
        return self._place[2]


def build_record(
    topic: str,
    partition: int,
    offset: int,
    key: Any,
    value: Any,
    headers: Mapping[str, str],
    timestamp: datetime,
    repeated: bool = False,
) -> Record[Any, Any]:
    """Build a record without Kafka, of its parts."""
    message = Given(topic, partition, offset)
    record: Record[Any, Any] = Record(
        message, key, value, offset + 1 if repeated else None
    )
    record._headers = dict(headers)
    record._timestamp = timestamp
    return record


def read_headers(message: Message) -> dict[str, str]:
    """Read the headers as text; if a name is repeated, the last one counts."""
    return {name: _as_text(value) for name, value in list_headers(message)}


def read_header(message: Message, name: str) -> str | None:
    """Read one header as text; if it is repeated, the last one counts."""
    for one, value in reversed(list_headers(message)):
        if one == name:
            return _as_text(value)
    return None


def read_cause(message: Message) -> str | None:
    """Read the cause, as :attr:`Record.cause` is, without making a record."""
    return read_header(message, _CAUSE)


def read_version(message: Message, *, strict: bool = False) -> int | None:
    """Read the version, as :attr:`Record.version` is, without making a record.

    Args:
        message: Kafka's.
        strict: whether to refuse a header that is no version, unless it is empty.

    Raises:
        RecordError: the name of a header is not UTF-8, or its value is refused.
    """
    # Each record of a read model passes here: a call less.
    try:
        headers = message.headers() or ()
    except SystemError:
        headers = hide_headers(message)
    for name, value in reversed(headers):
        if name == _VERSION:
            version = _as_version(value)
            if version is None and value and strict:
                raise _refuse_version(message)
            return version
    return None


def read_text(message: Message) -> str | None:
    """Read a key that is UTF-8.

    Raises:
        RecordError: it is not.
    """
    key = message.key()
    try:
        return key.decode() if isinstance(key, bytes) else key
    except UnicodeDecodeError:
        raise refuse_key(message, "UTF-8") from None


def make_record(
    message: Message,
    value: Any,
    read_key: Callable[[Message], Any] = read_text,
    highest: int | None = None,
) -> Record[Any, Any]:
    """Make the record of a message whose value is already decoded.

    Args:
        message: Kafka's.
        value: the decoded value.
        read_key: decodes the key.
        highest: the highest offset to go on from that the partition ever had.

    Raises:
        RecordError: its key is not of the type that ``read_key`` reads.
    """
    return Record(message, read_key(message), value, highest)


def describe(message: Message) -> str:
    """Name a message's place, for people to read."""
    return f"{message.topic()}/{message.partition()} offset {message.offset()}"


def refuse_key(message: Message, what: str) -> RecordError:
    """Make the error for a key that is not of the declared type; it is left out."""
    return RecordError(
        f"the record at {describe(message)} cannot be read: its key is not {what}. To "
        "take keys of any form, declare key_type=bytes"
    )


def _refuse_version(message: Message) -> RecordError:
    return RecordError(
        f"the record at {describe(message)} cannot be compared with others of its key: "
        f"its header {_VERSION} is no whole number from 0 to {_MOST_VERSION}. Send the "
        "version of the change in it, or leave the header out"
    )


def _list_parts(record: Record[Any, Any]) -> list[Any]:
    return [getattr(record, name) for name in Record.__match_args__]


def _as_version(value: object) -> int | None:
    if isinstance(value, bytes) and len(value) <= _DIGITS and value.isdigit():
        version = int(value)
        return version if version <= _MOST_VERSION else None
    return None


def _as_text(value: object) -> str:
    return (
        value.decode("utf-8", "replace")
        if isinstance(value, bytes)
        else str(value or "")
    )
