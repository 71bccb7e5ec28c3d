"""Read the keys of a topic, with the versions of their records, in columns.

Positions decide where a read ends, and only committed records count.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Message

from jobs_lib.kafka.headers import hide_headers
from jobs_lib.kafka.reader import PartsReader, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
        items = iter(reader)
        while True:
            with pausing_collector():
                item = next(items, None)
                if item is None:
                    return
                (_, partition), messages = item
                block = make_columns(partition, messages, values)
            yield block


@contextmanager
def pausing_collector() -> Iterator[None]:
    """Pause Python's garbage collector, unless it is off already.

    It would look at all objects of a block several times, which takes a quarter of the
    reader's time, and none of them is garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def parse_version(value: object) -> int | None:
    """Parse the header of a version as consumers do; None if they would ignore it."""
    if isinstance(value, bytes) and len(value) <= _DIGITS and value.isdigit():
        version = int(value)
        return version if version <= _LARGEST else None
    return None


def make_columns(partition: int, messages: list[Message], values: bool) -> Keys:
    """Make columns of records.

    Each column is made of all records at once where that can be: a step of the
    interpreter for each record would cost as much as the client does.
    """
    found = [*map(Message.value, messages)]
    return Keys(
        partition,
        [offset or 0 for offset in map(Message.offset, messages)],
        _decode([*map(Message.key, messages)]),
        _parse_versions(_find_versions(messages)),
        [value is None for value in found],
        found if values else [],
    )


def _decode(keys: list[Any]) -> list[str | None]:
    try:
        return [*map(bytes.decode, keys)]
    except (TypeError, UnicodeDecodeError):
        return [*map(_decode_key, keys)]


def _decode_key(key: bytes | str | None) -> str | None:
    if key is None or isinstance(key, str):
        return key
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None


def _find_versions(messages: list[Message]) -> list[object]:
    given: Any = map(Message.headers, messages)
    found: list[object] = []
    while len(found) < len(messages):
        try:
            for headers in given:
                # The relay writes it last.
                if headers and headers[-1][0] == VERSION:
                    found.append(headers[-1][1])
                else:
                    found.append(_find_version(headers))
        except SystemError:
            # The name of one is not UTF-8, so consumers read no version either. The
            # others follow: a second look at these would crash the process.
            hide_headers(messages[len(found)])
            found.append(None)
    return found


def _find_version(headers: Any) -> object:
    # From the last one on: if a header is repeated, the last one counts.
    for name, value in reversed(headers or ()):
        if name == VERSION:
            return value
    return None


def _parse_versions(found: list[Any]) -> list[int | None]:
    try:
        lengths = [*map(len, found)]
        if min(lengths) and max(lengths) < _DIGITS and b"".join(found).isdigit():
            return [*map(int, found)]
    except TypeError:
        pass  # Some record has no version, or one that is null.
    return [*map(parse_version, found)]
