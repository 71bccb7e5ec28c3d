"""Write the state of the world to the log, and find it: PROTOCOL.md, section 8."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jobs_lib.coordination.messages import Sender, Snapshot, Unreadable, decode
from jobs_lib.coordination.world import World, find_digest
from jobs_lib.kafka.reader import PartsReader, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jobs_lib.settings import Settings

NOBODY = "-.-"
"""The group of snapshots: they are about all groups."""
EVERY = 5_000
"""Offsets from one snapshot to the next."""
EVERY_MS = 600_000
"""Milliseconds of the log's time, likewise."""
AGAIN_MS = 10_000
"""Of these pieces of the log's time, the first record of each is another try."""
LARGEST = 400_000
"""Characters of a part's entries: a record stays below half of what Kafka takes."""
_WINDOW = EVERY + 1_000
"""Offsets from the end in which the last snapshot mostly stands."""


class Found(NamedTuple):
    """A complete snapshot whose digest is right."""

    as_of: int
    time_ms: int
    partitions: int
    entries: str
    pauses: str
    is_partial: bool = False
    """Whether positions may be lost with records before it."""

    def restore(self, place: int) -> World:
        """Make the world that it states."""
        world = World(place)
        world.restore(self.entries, self.pauses)
        world.partitions = self.partitions
        world.next_offset = self.as_of + 1
        world.now_ms = self.time_ms
        return world


class Collector:
    """Puts the parts of one place's snapshots together."""

    def __init__(self) -> None:
        self._parts: dict[Snapshot, dict[int, str]] = {}
        """The entries of each part, by what the parts have in common."""

    def read(self, offset: int, partitions: int, value: bytes) -> Found | None:
        """Add a record of a log of so many partitions, if it is a part of a snapshot.

        Returns what :meth:`add` does.
        """
        read = decode(value)
        if isinstance(read, Unreadable) or read[0] != partitions:
            return None
        said = read[1]
        if not isinstance(said, Snapshot):
            return None
        return self.add(offset, partitions, said)

    def add(self, offset: int, partitions: int, message: Snapshot) -> Found | None:
        """Add a part; return the snapshot that is complete with it, if it is right.

        Args:
            offset: of the part.
            partitions: of the log, as the sender sees it, too.
            message: the part.
        """
        # Nobody knows what comes later, and a number too large is none of a part.
        if message.as_of >= offset or message.part >= message.parts:
            return None
        common = message._replace(part=0, entries="")
        parts = self._parts.setdefault(common, {})
        parts[message.part] = message.entries
        if len(parts) < message.parts:
            return None
        del self._parts[common]
        found = Found(
            message.as_of,
            message.time_ms,
            partitions,
            "".join(parts[number] for number in range(message.parts)),
            message.pauses,
            message.partial,
        )
        return found if _is_right(found, message.digest) else None


class Pacer:
    """Says whose record in one place is followed by a snapshot."""

    def __init__(self) -> None:
        self._since_ms: int | None = None
        self._read_ms = 0
        """The time of the log at the record before."""

    def is_due(self, offset: int, now_ms: int) -> bool:
        """Whether the sender of this record writes one. Ask about each record.

        Members may differ by some records about when the time is over, and each of them
        may wait for another one then. All agree about the tries that follow.
        """
        before, self._read_ms = self._read_ms, now_ms
        if self._since_ms is None:
            self._since_ms = now_ms
        since = self._since_ms
        is_late = now_ms - since >= EVERY_MS and (
            before - since < EVERY_MS or now_ms // AGAIN_MS != before // AGAIN_MS
        )
        return is_late or (offset > 0 and offset % EVERY == 0)

    def written(self, now_ms: int) -> None:
        """Note that one was read."""
        self._since_ms = now_ms


def split(
    world: World,
    sender: Sender,
    largest: int = LARGEST,
    *,
    is_partial: bool = False,
) -> Iterator[Snapshot]:
    """Make the parts of the snapshot of a world.

    Args:
        world: as it is behind its last record.
        sender: its client and instance are taken.
        largest: characters of the entries of a part.
        is_partial: whether nobody knew the beginning.
    """
    lines, pauses, digest = world.spell()
    sizes = [0]
    parts: list[list[str]] = [[]]
    for line in lines:
        if sizes[-1] + len(line) > largest and parts[-1]:
            parts.append([])
            sizes.append(0)
        parts[-1].append(line)
        sizes[-1] += len(line)
    texts = ["".join(one) for one in parts]
    author = Sender(NOBODY, sender.client_id, sender.instance_id)
    for number, text in enumerate(texts):
        yield Snapshot(
            author,
            world.next_offset - 1,
            world.now_ms,
            number,
            len(texts),
            digest,
            text,
            pauses,
            is_partial,
        )


def _is_right(found: Found, digest: str) -> bool:
    """Whether a snapshot has the digest that it states, and can be read."""
    if find_digest([found.entries], found.pauses) != digest:
        return False
    try:
        found.restore(0)
    except ValueError:
        return False
    return True


def is_near(start: int, end: int) -> bool:
    """Whether a part of the log is so short that a snapshot saves little."""
    return end - start <= _WINDOW


def find_last(
    settings: Settings,
    topic: str,
    group: str,
    ranges: Mapping[int, tuple[int, int]],
    partitions: int,
) -> dict[int, Found]:
    """Find a late snapshot of each partition of the log, if there is one that counts.

    It reads from the ends backwards: mostly only a small part.

    Args:
        settings: where Kafka is.
        topic: the log's name in Kafka.
        group: names the client.
        ranges: the first offset of each partition, and the one behind the last. A
            snapshot counts if all records behind it are there.
        partitions: how many the log has. Snapshots of another number do not count.
    """
    found: dict[int, Found] = {}
    size = _WINDOW
    open_ = {one for one, (low, end) in ranges.items() if low < end}
    while open_:
        spans = {
            (topic, one): Span(
                max(ranges[one][0], ranges[one][1] - size), ranges[one][1]
            )
            for one in open_
        }
        found |= _find(settings, group, spans, ranges, partitions)
        open_ = {
            one
            for one in open_ - found.keys()
            if ranges[one][1] - size > ranges[one][0]
        }
        size *= 8
    return found


def _find(
    settings: Settings,
    group: str,
    spans: Mapping[tuple[str, int], Span],
    ranges: Mapping[int, tuple[int, int]],
    partitions: int,
) -> dict[int, Found]:
    collectors = {place: Collector() for _, place in spans}
    found: dict[int, Found] = {}
    # As members read: else it waits for the end of somebody's transaction.
    with PartsReader(settings, spans, group, sees_uncommitted=True) as reader:
        for (_, place), messages in reader:
            for message in messages:
                value = message.value()
                # Most records are none: do not read them all.
                if not isinstance(value, bytes) or b'"Snapshot"' not in value:
                    continue
                offset = message.offset() or 0
                one = collectors[place].read(offset, partitions, value)
                if one is None or one.as_of + 1 < ranges[place][0]:
                    continue
                # A writer that stood still may have written an older one later.
                if place not in found or one.as_of >= found[place].as_of:
                    found[place] = one
    return found
