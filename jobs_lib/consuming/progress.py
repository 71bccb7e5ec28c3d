"""One owned partition: the records that wait in memory, and how far it is."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from jobs_lib.backoff import RECONNECT
from jobs_lib.consuming.share import Share

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from confluent_kafka import Message

    from jobs_lib.consuming.changes import Changes
    from jobs_lib.consuming.gate import Held
    from jobs_lib.consuming.placing import Placing
    from jobs_lib.consuming.subscription import BlockError
    from jobs_lib.kafka.member import Partition

FIRST_SIZE = 500
"""Records of the first block: how long they take is not known yet."""
FIRST_WHOLE_SIZE = 20
"""The same where a block cannot end by time, because all its records are read or
handled at once."""
_CALM_SECONDS = 60.0
"""For how long blocks do not grow after one that failed only as a whole."""
_LEAP = 8
"""By how much blocks grow at once that take next to no time."""
_MESSAGE_BYTES = 800
"""What a message needs in memory beside its value, with usual headers."""


class Ahead(NamedTuple):
    """A block that was read before its turn."""

    block: list[Message]
    changes: Changes | BlockError
    """What it does to a read model, or why it cannot be read."""
    seconds: float = 0.0
    """How long that took."""


class Undone(NamedTuple):
    """A block that failed as a whole."""

    records: int
    error: str
    """Why, without values."""


class Effects(NamedTuple):
    """Which records of a partition have effects elsewhere: those from ``begin`` on."""

    begin: int = 0
    end: float = math.inf
    """The offset of the first one behind them."""

    def reach(self, first: int, following: int) -> bool:
        """Whether records between these offsets have any."""
        return first < self.end and following > self.begin

    def cut(self, block: list[Message]) -> list[Message]:
        """Cut a block where effects begin or end: of each key only the last tells."""
        first = get_offset(block[0])
        mark = next((one for one in self if first < one), math.inf)
        return [one for one in block if get_offset(one) < mark]


ALL = Effects()


@dataclass(slots=True, eq=False)
class Progress:
    """One owned partition.

    ``failed`` and ``search_until`` limit the next block after a failure, so that each
    good record of the block is handled once more at the most.
    """

    partition: Partition
    epoch: int
    stored: int | None
    """The offset in the database; None if nothing was applied yet."""
    highest: int | None = None
    """The highest offset that was ever stored: records below it come again."""
    effects: Effects = ALL
    topic_id: UUID | None = None
    """The topic, as Kafka names it for ever; None if the brokers do not say."""
    placing: Placing | None = None
    """Gives jobs the places of its records; None if nobody tells how far they are."""
    waiting: deque[Message] = field(default_factory=deque)
    waiting_bytes: int = 0
    """What the waiting records need in memory."""
    reading: bool = False
    """Set once the client reads from the stored offset: earlier records are useless."""
    in_doubt: bool = False
    """Set when the offset in the database may be another one: read it again first."""
    range: tuple[int, int] | None = None
    """If no record has the stored offset: the offsets that the partition has, from the
    first to before the second."""
    replaced: bool = False
    """Set when the topic may be another one than that of the stored offset."""
    stopped: bool = False
    """Set while no record may be read, because some before it are gone."""
    ended: bool = False
    """Set once it has ended before the stored offset: until somebody sets that one, it
    stands still, however far it grows."""
    paused: bool = False
    """Set while Kafka is not asked for more, since the waiting records move slowly."""
    oldest: int | None = None
    """If nothing was applied yet: the oldest offset, where that was asked for."""
    held: Held | None = None
    """Set while the next record waits for other groups."""
    busy: bool = False
    """Set while a thread works on it: no other one takes it."""
    leaving: bool = False
    """Set once it is to be given up: no block of it is begun any more."""
    most: int = 1
    """The most records of any block."""
    size: int = FIRST_SIZE
    """The most records of the next block."""
    reads_ahead: bool = False
    """Whether a thread may read its block while the database writes another one."""
    share: Share = field(default_factory=Share)
    """How busy the blocks of its topic keep a thread."""
    is_alone: bool = True
    """Whether no other block has run beside its last one."""
    ahead: Ahead | None = None
    """The next block, if it was read while the database wrote another one."""
    taken: int = 0
    """The waiting records that a running block has."""
    taken_at: float = 0.0
    """When its last block was begun."""
    failed: int | None = None
    """The offset of a record that has failed; it is tried alone."""
    search_until: int | None = None
    """A record below this offset has failed; each is tried alone until it is found."""
    undone: Undone | None = None
    """Set while the records of a block that failed are tried one by one, and none of
    them has failed."""
    calm_until: float = -math.inf
    """Until when its blocks do not grow, by the monotonic clock."""
    failures: int = 0
    """Failed attempts in a row."""
    retry_at: float = 0.0
    """When it is tried again after a failure, by the monotonic clock."""
    unsure_until: int | None = None
    """Behind a block whose commit may have succeeded, though nobody was told."""
    lost_at: int | None = None
    """The offset of the first record of the block that lost its connection."""

    @property
    def origin(self) -> str:
        """The partition as ``topic/partition``."""
        topic, number = self.partition
        return f"{topic}/{number}"

    def is_ready(self, now: float) -> bool:
        """Whether a worker has something to do with it, by the monotonic clock."""
        return (
            not self.busy
            and not self.leaving
            # Who sets the offset of a record that fails need not wait for its next try.
            and (self.in_doubt or self.retry_at <= now)
            and bool(
                self.in_doubt or self.replaced or self.stopped or self._has_records
            )
        )

    @property
    def _has_records(self) -> bool:
        """Whether records can be applied, or are gone, which is told behind those."""
        if self.held is not None:
            return self.range is not None and not self.waiting
        return bool(self.waiting or self.range)

    @property
    def may_be_read(self) -> bool:
        """Whether its next records may be fetched, and nothing is asked before."""
        is_unsettled = self.replaced or self.stopped or self.ended or self.range
        return not (self.paused or is_unsettled)

    @property
    def competes(self) -> bool:
        """Whether a second thread would only compete with it for the interpreter.

        Several records whose handler nobody knows yet are measured alone.
        """
        if self.reads_ahead or self.share.is_busy:
            return True
        return self.share.is_busy is None and len(self.waiting) > 1

    @property
    def has_other_records(self) -> bool:
        """Whether other records may lie below the stored offset than were handled."""
        return self.replaced or self.ended

    @property
    def is_untouched(self) -> bool:
        """Whether no record of it has come yet."""
        return self.stored is None and not (self.waiting or self.busy)

    def comes_again(self, first: int) -> bool:
        """Whether records from this offset on have been passed before."""
        return self.highest is not None and first < self.highest

    @property
    def is_settled(self) -> bool:
        """Whether its records may be applied without a question before."""
        return not (self.in_doubt or self.replaced or self.range or self.stopped)

    def take_ahead(self) -> Ahead | None:
        """Take the block that was read ahead, if it still is the next one."""
        ahead, self.ahead = self.ahead, None
        if ahead is None or len(self.waiting) < len(ahead.block):
            return None
        return ahead if self.waiting[0] is ahead.block[0] else None

    def push(self, messages: list[Message]) -> None:
        """Add records that have arrived."""
        self.waiting.extend(messages)
        self.waiting_bytes += measure(messages)

    def drop_first(self, count: int) -> None:
        """Take the oldest waiting records out."""
        self.waiting_bytes -= measure([self.waiting.popleft() for _ in range(count)])

    def drop_all(self) -> None:
        """Take all waiting records out."""
        self.waiting.clear()
        self.waiting_bytes = 0

    def let_go(self, limit: int) -> None:
        """Drop the newest waiting records until the others need so many bytes.

        Those of a running block stay, and one to go on with. Kafka is asked for the
        dropped ones again, from :attr:`next_fetch` on.
        """
        while len(self.waiting) > self.taken + 1 and self.waiting_bytes > limit:
            self.waiting_bytes -= measure([self.waiting.pop()])

    @property
    def next_fetch(self) -> int | None:
        """The offset behind the last waiting record."""
        return get_offset(self.waiting[-1]) + 1 if self.waiting else self.stored

    def goes_on_from(self, begun: int) -> bool:
        """Whether a client that reads from this offset leaves out no record.

        It may be negative: Kafka's own for the oldest record.
        """
        following = self.next_fetch
        return begun <= ((self.oldest or 0) if following is None else following)

    def adapt(
        self,
        count: int,
        seconds: float,
        worked: float,
        budget: float,
        read_in: float = 0.0,
    ) -> None:
        """Choose the size of the next block by the time that this one took.

        Args:
            count: the records that were applied.
            seconds: how long they took.
            worked: how many of them the thread itself was at work.
            budget: how long a block should take at the most, in seconds.
            read_in: how long it took to read it before its turn.
        """
        self.share.note(count, seconds, worked, is_alone=self.is_alone)
        # Another one is written while it is read: a stop waits for one of both.
        seconds = max(seconds, read_in)
        if seconds > budget:
            self.shrink(count)
        elif count >= self.size:
            if seconds < budget / 2 and time.monotonic() >= self.calm_until:
                factor = _LEAP if seconds < budget / _LEAP / 2 else 2
                self.size = min(self.most, factor * self.size)
            self.share.size = self.size

    def shrink(self, count: int) -> None:
        """Let the next block be half as large as one of so many records."""
        self.size = self.share.size = max(1, min(self.size, count // 2))

    def find_undone(self) -> Undone | None:
        """Find a block that failed, though each of its records has gone in alone.

        Smaller blocks follow for a while.
        """
        undone = self.undone
        if undone is None or (self.stored or 0) < (self.search_until or 0):
            return None
        self.undone = None
        self.shrink(undone.records)
        self.calm_until = time.monotonic() + _CALM_SECONDS
        return undone

    def choose(self) -> list[Message]:
        """The records of the next block, which stay in the queue."""
        size = min(self.size, self.most, len(self.waiting))
        if not size:
            return []
        if self.share.is_busy is None and not self.reads_ahead:
            size = min(size, FIRST_SIZE)
        first = get_offset(self.waiting[0])
        if self.search_until is not None and first >= self.search_until:
            self.search_until = None
        if self.failed is not None and first > self.failed:
            self.failed = None
        if self.search_until is not None:
            size = 1
        block = [*islice(self.waiting, size)]
        if (failed := self.failed) is not None:
            good = [one for one in block if get_offset(one) < failed]
            if len(good) < size:
                # These go in first, and then the one that failed is tried alone.
                return good or block[:1]
        return block if self.effects is ALL else self.effects.cut(block)

    def note_failure(self, block: list[Message], index: int | None) -> bool:
        """Note a failed block; returns whether its first record is known to fail.

        Args:
            block: the records of the block.
            index: of the record that has failed; None if that is not known.
        """
        if index is None and len(block) > 1:
            self.search_until = get_offset(block[-1]) + 1
            return False
        self.failed = get_offset(block[index or 0])
        if index:
            return False
        self.wait_longer()
        return True

    def wait_longer(self) -> None:
        """Let the partition wait before its next attempt, longer after each one."""
        self.failures += 1
        self.retry_at = time.monotonic() + RECONNECT.delay(self.failures)

    def move(self, stored: int, count: int) -> None:
        """Note that so many waiting records are applied and committed."""
        self.drop_first(count)
        self.stored = stored
        self.failures = 0
        self.lost_at = None

    def stop(self) -> None:
        """Read nothing more for some time: records before the next one are gone."""
        self.drop_all()
        self.reading = self.paused = False
        self.range = self.held = None
        self.stopped = True
        self.wait_longer()

    def start_again(self, stored: int | None) -> None:
        """Drop everything that waits; the client must seek to ``stored``."""
        self.drop_all()
        self.reading = False
        self.range = self.held = None
        self.replaced = self.stopped = self.ended = self.paused = False
        self.stored, self.oldest = stored, None
        self.failed = self.search_until = self.lost_at = self.undone = None
        self.failures, self.retry_at = 0, 0.0

    def has_committed(self, stored: int | None) -> bool:
        """Whether a commit whose answer was lost may have left this offset."""
        sure, unsure = self.stored or 0, self.unsure_until or 0
        return stored == self.stored or sure < (stored or 0) <= unsure

    def continues_at(self, stored: int | None) -> bool:
        """Whether the waiting records go on from there; drops those before it."""
        if stored is None or self.stored is None or stored < self.stored:
            return stored == self.stored
        while self.waiting and get_offset(self.waiting[0]) < stored:
            self.drop_first(1)
        # An empty queue may have lost records that lay before the new offset.
        if stored != self.stored and not self.waiting:
            return False
        if stored != self.stored:
            # What has failed there is passed.
            self.failures, self.retry_at = 0, 0.0
        self.stored = stored
        return True


def get_offset(message: Message) -> int:
    """Get a message's offset."""
    return message.offset() or 0


def measure(messages: Sequence[Message]) -> int:
    """Estimate the bytes that messages need in memory."""
    return _MESSAGE_BYTES * len(messages) + sum(map(len, messages))
