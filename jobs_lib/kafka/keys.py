"""Read the keys of a topic, with the versions of their records, in columns.

Positions decide where a read ends, and only committed records count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jobs_lib.kafka.reader import PartsReader, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from confluent_kafka import Message

    from jobs_lib.settings import Settings

GROUP = "jobs_lib-keys"
"""Names the client; no group of this name is joined."""
VERSION = "ce_version"
"""The header with the version of a record."""
PIECE = 500_000
"""Offsets in one piece: a client starts in a fraction of the time that they take."""
MOST_PIECES = 1_000
_MOST = 10_000
"""Records in one block: a larger one costs memory, and a smaller one calls."""
_DIGITS = 19
"""Digits of the largest version: the relay writes a bigint."""
_LARGEST = 2**63 - 1


class Piece(NamedTuple):
    """Some offsets of a partition, read by one task.

    Attributes:
        partition: its number.
        start: the first offset; None for that of the oldest record.
        end: the offset before which it ends.
    """

    partition: int
    start: int | None
    end: int


class Keys(NamedTuple):
    """Records of one partition, in columns, in the order of their offsets.

    Attributes:
        partition: its number.
        offsets: of the records.
        keys: as text; None where a record has none, or one that is not UTF-8.
        versions: as the relay wrote them; None where a record has none.
        tombstones: whether a record has no value.
        values: empty unless they were asked for.
    """

    partition: int
    offsets: list[int]
    keys: list[str | None]
    versions: list[int | None]
    tombstones: list[bool]
    values: list[bytes | None]


def cut(
    starts: Mapping[int, int],
    ends: Mapping[int, int],
    size: int = PIECE,
    most: int = MOST_PIECES,
    *,
    oldest: bool = True,
) -> list[Piece]:
    """Cut partitions into pieces of about equal size, which several tasks read.

    Args:
        starts: the offset of the oldest record of each partition.
        ends: the offset before which each partition ends.
        size: offsets in one piece.
        most: pieces at most, but one for each partition; they are larger then.
        oldest: whether the starts are those of the oldest records, which may be deleted
            before they are read.
    """
    lengths = {one: max(0, ends[one] - starts.get(one, 0)) for one in ends}
    size = max(size, -(-sum(lengths.values()) // most))
    pieces = []
    for partition, length in sorted(lengths.items()):
        begin, end = starts.get(partition, 0), ends[partition]
        for start in range(begin, begin + length, size):
            first = None if oldest and start == begin else start
            pieces.append(Piece(partition, first, min(end, start + size)))
    return pieces


def read_keys(
    settings: Settings, topic: str, piece: Piece, *, values: bool = False
) -> Iterator[Keys]:
    """Read the records of a piece, a block after the other.

    Args:
        settings: where Kafka is.
        topic: by its name in Kafka.
        piece: what to read.
        values: whether the blocks hold the values, too.

    Raises:
        AccessError: Kafka does not let this client in, or denies the right to read.
        OffsetError: records of the piece are gone, or the topic was made anew.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers.
    """
    spans = {(topic, piece.partition): Span(piece.start, piece.end)}
    with PartsReader(settings, spans, GROUP, most=_MOST) as reader:
        for (_, partition), messages in reader:
            yield _make_columns(partition, messages, values)


def parse_version(value: object) -> int | None:
    """Parse the header of a version as consumers do; None if they would ignore it."""
    if isinstance(value, bytes) and len(value) <= _DIGITS and value.isdigit():
        version = int(value)
        return version if version <= _LARGEST else None
    return None


def _make_columns(partition: int, messages: list[Message], values: bool) -> Keys:
    found = [message.value() for message in messages]
    return Keys(
        partition,
        [message.offset() or 0 for message in messages],
        [*map(_read_key, messages)],
        [*map(_read_version, messages)],
        [value is None for value in found],
        found if values else [],
    )


def _read_key(message: Message) -> str | None:
    key = message.key()
    if key is None or isinstance(key, str):
        return key
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None


def _read_version(message: Message) -> int | None:
    # From the last one on: if a header is repeated, the last one counts.
    for name, value in reversed(message.headers() or ()):
        if name == VERSION:
            return parse_version(value)
    return None
