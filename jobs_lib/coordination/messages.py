"""What members write to the log, and how it is spelt: see PROTOCOL.md, section 3."""

from __future__ import annotations

import json
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pydantic_core import from_json

from jobs_lib.partitioner import choose_partition

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = 1
LARGEST_OFFSET = 2**63 - 1
LARGEST_PARTITION = 2**31 - 1
SHORTEST_INTERVAL_MS = 100
LONGEST_INTERVAL_MS = 3_600_000
NAME_LIMIT = 200
TOPIC_LIMIT = 249
NOT_COUNTED = -1
_ZERO = ord("0")
_DIGITS = 18
"""Of a position that is surely below the largest offset."""
_LONGEST_START = 1_000
"""Bytes, so that those that are kept take 20 MB at most."""


class Sender(NamedTuple):
    """A member of a group, in one of its runs."""

    group_id: str
    client_id: str
    """The same after a restart."""
    instance_id: str
    """Another one after each start."""


class Shared(NamedTuple):
    """A partition that the members of a group share."""

    group_id: str
    topic: str
    partition: int

    @property
    def origin(self) -> str:
        """The partition as ``topic/partition``."""
        return f"{self.topic}/{self.partition}"


class Heartbeat(NamedTuple):
    """The sender holds a partition, and has processed all before a position."""

    sender: Sender
    shared: Shared
    claim: int
    position: int | None


class ClaimingPartition(NamedTuple):
    """The sender wants to hold a partition."""

    sender: Sender
    shared: Shared
    interval_ms: int


class ReleasingPartition(NamedTuple):
    """The sender holds a partition no more; its successor begins at a position."""

    sender: Sender
    shared: Shared
    claim: int
    position: int | None


class ClaimingMessages(NamedTuple):
    """The sender alone processes the records from ``first`` to before ``end``."""

    sender: Sender
    shared: Shared
    claim: int
    first: int | None
    end: int


class ReleaseGroup(NamedTuple):
    """The sender pauses its group until a time of the log."""

    sender: Sender
    msg_expire_time: int
    """Milliseconds since 1970, by the brokers' clocks."""


class Probe(NamedTuple):
    """The sender lives, and wants to know the time."""

    sender: Sender
    wants_snapshot: bool = False
    interval_ms: int | None = None
    """For how long a run that begins lets an earlier run of its client answer."""


class Snapshot(NamedTuple):
    """A part of what the log has said up to an offset; see PROTOCOL.md, section 8."""

    sender: Sender
    as_of: int
    time_ms: int
    part: int
    parts: int
    digest: str
    entries: str
    pauses: str
    partial: bool = False
    """Whether nobody knew the beginning: positions may be lost."""


Message: TypeAlias = (
    Heartbeat
    | ClaimingPartition
    | ReleasingPartition
    | ClaimingMessages
    | ReleaseGroup
    | Probe
    | Snapshot
)


_Start: TypeAlias = tuple[
    int, type[Heartbeat] | type[ReleasingPartition], Sender, Shared, int
]
"""A record without its position: partitions of the log, kind, and its other fields."""


class Unreadable(StrEnum):
    """Why a record is passed over."""

    NO_MESSAGE = "is no message"
    OTHER_VERSION = "has another version"
    UNKNOWN_TYPE = "has an unknown type"


@lru_cache(maxsize=100_000)
def find_place(topic: str, partition: int, partitions: int) -> int:
    """Return the partition of the log that all records about a partition have."""
    return choose_partition(f"{topic}/{partition}", partitions)


def encode(message: Message, partitions: int) -> bytes:
    """Spell a message for a log of so many partitions."""
    sender = message.sender
    found: dict[str, Any] = {
        "v": VERSION,
        "type": type(message).__name__,
        "n": partitions,
        "group_id": sender.group_id,
        "client_id": sender.client_id,
        "instance_id": sender.instance_id,
    }
    for name, value in zip(message._fields[1:], message[1:], strict=True):
        if isinstance(value, Shared):
            found |= {"topic": value.topic, "partition": value.partition}
        else:
            found[name] = value
    return json.dumps(found, separators=(",", ":")).encode()


def decode(value: bytes | None) -> tuple[int, Message] | Unreadable:
    """Read a record's value; return how many partitions the sender saw, too."""
    if value is None:
        return Unreadable.NO_MESSAGE
    # Nearly all records are heartbeats, and differ from the ones before in the position
    # at their end alone.
    start, _, end = value.rpartition(b":")
    if start.endswith(b'"position"') and len(start) <= _LONGEST_START:
        number = end[:-1]
        if end.endswith(b"}") and (number == b"null" or _is_position(number)):
            known = _read_start(start)
            if known is not None:
                partitions, kind, sender, shared, claim = known
                position = None if number == b"null" else int(number)
                return partitions, kind(sender, shared, claim, position)
    return _read(value)


def _is_position(number: bytes) -> bool:
    """Whether these bytes are an integer as JSON spells it, and no large one."""
    return (
        number.isdigit()
        and len(number) <= _DIGITS
        and (number[0] != _ZERO or len(number) == 1)
    )


@lru_cache(maxsize=20_000)
def _read_start(start: bytes) -> _Start | None:
    """Read a record that lacks the position at its end; None if that is not all."""
    value = start + b":0}"
    read = _read(value)
    if isinstance(read, Unreadable):
        return None
    partitions, message = read
    if not isinstance(message, (Heartbeat, ReleasingPartition)):
        return None
    # Each field is there, and once: so the last one is the position, whatever it is.
    if value.count(b'"') != _READERS[type(message).__name__][1]:
        return None
    return partitions, type(message), message.sender, message.shared, message.claim


def _read(value: bytes) -> tuple[int, Message] | Unreadable:
    try:
        found = from_json(value, allow_inf_nan=False)
        if type(found) is not dict:
            return Unreadable.NO_MESSAGE
        version, kind = found["v"], found["type"]
        if type(version) is not int or type(kind) is not str:
            return Unreadable.NO_MESSAGE
        if version != VERSION:
            return Unreadable.OTHER_VERSION
        if kind not in _READERS:
            return Unreadable.UNKNOWN_TYPE
        read, quotes = _READERS[kind]
        # Sound fields and no other quote: nothing else can stand there, and no field
        # twice. Whoever writes more is read with care.
        if value.count(b'"') != quotes and not _is_plain(value):
            return Unreadable.NO_MESSAGE
        sender = _sender(found["group_id"], found["client_id"], found["instance_id"])
        return as_number(found["n"], LARGEST_PARTITION, 1), read(sender, found)
    except (KeyError, TypeError, ValueError):
        return Unreadable.NO_MESSAGE


def _is_plain(value: bytes) -> bool:
    """Whether each field comes once, and JSON's readers agree about its value."""
    fields = json.loads(value.decode(), object_pairs_hook=tuple)
    values = dict(fields)
    return len(values) == len(fields) and all(
        one is None
        or type(one) in (str, bool)
        or (type(one) is int and -LARGEST_OFFSET <= one <= LARGEST_OFFSET)
        for one in values.values()
    )


@lru_cache(maxsize=10_000)
def _sender(group_id: str, client_id: str, instance_id: str) -> Sender:
    return Sender(as_name(group_id), as_name(client_id), as_name(instance_id))


def _shared(sender: Sender, found: dict[str, Any]) -> Shared:
    # The cache takes True and 1.0 for 1.
    partition = as_number(found["partition"], LARGEST_PARTITION)
    return _make_shared(sender.group_id, found["topic"], partition)


@lru_cache(maxsize=100_000)
def _make_shared(group_id: str, topic: str, partition: int) -> Shared:
    return Shared(group_id, as_name(topic, TOPIC_LIMIT), partition)


def _heartbeat(sender: Sender, found: dict[str, Any]) -> Heartbeat:
    claim, position = as_number(found["claim"]), as_position(found["position"])
    return Heartbeat(sender, _shared(sender, found), claim, position)


def _claiming_partition(sender: Sender, found: dict[str, Any]) -> ClaimingPartition:
    interval = as_number(
        found["interval_ms"], LONGEST_INTERVAL_MS, SHORTEST_INTERVAL_MS
    )
    return ClaimingPartition(sender, _shared(sender, found), interval)


def _releasing_partition(sender: Sender, found: dict[str, Any]) -> ReleasingPartition:
    claim, position = as_number(found["claim"]), as_position(found["position"])
    return ReleasingPartition(sender, _shared(sender, found), claim, position)


def _claiming_messages(sender: Sender, found: dict[str, Any]) -> ClaimingMessages:
    claim, first = as_number(found["claim"]), as_position(found["first"])
    return ClaimingMessages(
        sender, _shared(sender, found), claim, first, as_number(found["end"])
    )


def _release_group(sender: Sender, found: dict[str, Any]) -> ReleaseGroup:
    return ReleaseGroup(sender, as_number(found["msg_expire_time"]))


def _probe(sender: Sender, found: dict[str, Any]) -> Probe:
    # A later release may leave it out, and an older one does not know it.
    told = found.get("interval_ms")
    is_sound = type(told) is int and (
        SHORTEST_INTERVAL_MS <= told <= LONGEST_INTERVAL_MS
    )
    return Probe(
        sender, found.get("wants_snapshot") is True, told if is_sound else None
    )


def _snapshot(sender: Sender, found: dict[str, Any]) -> Snapshot:
    texts = [found[name] for name in ("digest", "entries", "pauses")]
    if any(type(one) is not str for one in texts):
        raise ValueError
    as_of, time_ms, part, parts = (
        as_number(found[name]) for name in ("as_of", "time_ms", "part", "parts")
    )
    digest, entries, pauses = texts
    # A release that does not know the field leaves it out.
    partial = found.get("partial") is True
    return Snapshot(
        sender, as_of, time_ms, part, parts, digest, entries, pauses, partial
    )


# With each reader, how many quotes a record of the type has: two around each name and
# each text.
_READERS: dict[str, tuple[Callable[[Sender, dict[str, Any]], Message], int]] = {
    "Heartbeat": (_heartbeat, 30),
    "ClaimingPartition": (_claiming_partition, 28),
    "ReleasingPartition": (_releasing_partition, 30),
    "ClaimingMessages": (_claiming_messages, 32),
    "ReleaseGroup": (_release_group, 22),
    "Probe": (_probe, NOT_COUNTED),  # It may leave a field out.
    "Snapshot": (_snapshot, NOT_COUNTED),
}


def as_name(value: Any, limit: int = NAME_LIMIT) -> str:
    """Return what is a name; raise a ValueError for all else, as the next two do."""
    if type(value) is not str or not 0 < len(value) <= limit:
        raise ValueError
    return value


def as_number(value: Any, most: int = LARGEST_OFFSET, least: int = 0) -> int:
    """Return what is a number within bounds."""
    # A JSON `true` is an int to Python, and 1.0 is equal to 1.
    if type(value) is not int or not least <= value <= most:
        raise ValueError
    return value


def as_position(value: Any) -> int | None:
    """Return what is a position, or None for none."""
    return None if value is None else as_number(value)
