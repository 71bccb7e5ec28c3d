"""The keys of records: bytes in Kafka, and of one type to a consumer.

Each value has one form in bytes. Otherwise two keys of the topic, whose records lie in
two partitions, would be one key of the consumer, whose records had no order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

from jobs_lib.consuming.record import Given, read_text, refuse_key
from jobs_lib.errors import AnswerError, ConfigurationError
from jobs_lib.reasons import count_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from confluent_kafka import Message

    KeyReader: TypeAlias = "Callable[[Message], Any]"

_LONGEST = 2_000
"""Bytes of a key as text: an index of PostgreSQL holds some more."""
_INTEGER = re.compile(rb"0|-?[1-9][0-9]*")
_UUID = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class KnownKey:
    """What a read model has of one key."""

    has_row: bool = False
    version: int | None = None
    """Of the row, or of the end of the key; None if there is none."""
    has_ended: bool = False
    """Whether it knows of an end of the key, or of a state without a row."""
    noted_at: datetime | None = None
    """When it has noted that, or the place of a state without a version."""


class GivenKey(Given):
    """Stands for the message of a key that somebody has typed."""

    __slots__ = ("_key",)

    def __init__(self, topic: str, partition: int, key: str) -> None:
        super().__init__(topic, partition, 0)
        self._key = key.encode()

    def key(self) -> bytes:
        """The key as Kafka has it."""
        return self._key


def choose_reader(key_type: object, what: str) -> KeyReader:
    """Choose the function that reads keys of a type.

    Args:
        key_type: the declared type.
        what: the declaration, for messages.

    Raises:
        ConfigurationError: keys have no such type.
    """
    for known, reader in _READERS.items():
        if key_type is known:
            return reader
    raise ConfigurationError(
        f"the key_type of {what} is {key_type!r}: give str, bytes, int or UUID"
    )


def read_bytes(message: Message) -> bytes | None:
    """Read a key of any form."""
    key = message.key()
    return key.encode() if isinstance(key, str) else key


def read_integer(message: Message) -> int | None:
    """Read a key that is an integer's decimal text, as the outbox writes it.

    Raises:
        RecordError: it is none, or has other digits than are needed, such as ``007``.
    """
    key = read_bytes(message)
    if key is None:
        return None
    try:
        if _INTEGER.fullmatch(key):
            return int(key)
    except ValueError:
        # Python reads integers of up to 4,300 digits.
        pass
    raise refuse_key(message, "the decimal text of an integer")


def read_uuid(message: Message) -> UUID | None:
    """Read a key that is the text of a UUID with hyphens, in small letters.

    Raises:
        RecordError: it is none.
    """
    key = read_bytes(message)
    if key is None:
        return None
    if _UUID.fullmatch(key):
        return UUID(key.decode())
    raise refuse_key(message, "the text of a UUID")


def write_key(key: object, key_type: type) -> str:
    """Write a key as the tables of the library have it, and the consumer writes it.

    Args:
        key: given by an application.
        key_type: the declared type.

    Raises:
        AnswerError: it is of another type, or no index could hold it.
    """
    if type(key) is not key_type:
        raise AnswerError(
            f"the key is of the type {type(key).__name__}, and the read model's keys "
            f"are declared as {key_type.__name__}: give one of that type"
        )
    text = key.hex if isinstance(key, UUID) else key
    text = f"\\x{key.hex()}" if isinstance(key, bytes) else str(text)
    if "\0" in text or not 0 < count_bytes(text) <= _LONGEST:
        raise AnswerError(
            f"a key must have 1 to {_LONGEST:,} bytes of UTF-8 without NUL, and this "
            f"one has not ({len(text):,} characters): no read model has such a key"
        )
    return text


def read_written(text: str, key_type: type) -> Any:
    """Read a key that :func:`write_key` has written."""
    if key_type is bytes:
        return bytes.fromhex(text.removeprefix("\\x"))
    return key_type(text)


def encode_key(key: str | bytes | int | UUID) -> bytes:
    """Encode a key as the outbox does, and Kafka has it."""
    return key if isinstance(key, bytes) else str(key).encode()


_READERS: dict[object, KeyReader] = {
    str: read_text,
    bytes: read_bytes,
    int: read_integer,
    UUID: read_uuid,
}
