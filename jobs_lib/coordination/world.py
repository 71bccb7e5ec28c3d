"""The state of the world: a pure function of one partition of the log.

See PROTOCOL.md, sections 2 and 4. Nothing here knows Kafka, a clock or a thread. Two
worlds that were given the same records are equal, however long ago.
"""

from __future__ import annotations

import copy
import json
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic_core import from_json

from jobs_lib.coordination.messages import (
    LARGEST_PARTITION,
    LONGEST_INTERVAL_MS,
    SHORTEST_INTERVAL_MS,
    TOPIC_LIMIT,
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    Probe,
    ReleaseGroup,
    ReleasingPartition,
    Sender,
    Shared,
    Snapshot,
    Unreadable,
    as_name,
    as_number,
    as_position,
    decode,
    find_place,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


class Freshness(StrEnum):
    """How sure it is that a holder lives."""

    FRESH = "fresh"
    UNKNOWN = "unknown"
    STALE = "stale"


class Outcome(StrEnum):
    """What a record did; all but ``VALID`` did nothing."""

    VALID = "valid"
    UNREADABLE = "unreadable"
    OTHER_COUNT = "the sender sees another number of partitions of the log"
    OTHER_PLACE = "the partition has its place elsewhere"
    HELD = "another member holds the partition"
    NOT_HELD = "the sender does not hold the partition by that claim"
    UNCONFIRMED = "the claim has no heartbeat yet"
    NOT_NEXT = "the records are not the next ones"
    PAUSED = "the group is paused"


class Holding(NamedTuple):
    """A member that holds a partition."""

    client_id: str
    instance_id: str
    claim: int
    """The offset in the log of the record by which it holds."""
    interval_ms: int
    last_ms: int
    """The time of the log at its last valid record."""
    confirmed: bool
    """Whether a heartbeat has followed the claim."""

    def is_of(self, sender: Sender) -> bool:
        """Whether this run of this member holds it."""
        return (
            self.instance_id == sender.instance_id
            and self.client_id == sender.client_id
        )

    def find_freshness(self, now_ms: int) -> Freshness:
        """Judge it at a time of the log."""
        age = now_ms - self.last_ms
        if age < self.interval_ms:
            return Freshness.FRESH
        return Freshness.UNKNOWN if age <= 2 * self.interval_ms else Freshness.STALE


class Entry(NamedTuple):
    """What is known of a partition that a group shares."""

    position: int | None = None
    """The offset at which the next holder begins; None while nobody has told one."""
    holding: Holding | None = None


class Pause(NamedTuple):
    """A pause of a group."""

    until_ms: int
    client_id: str
    instance_id: str


_new = tuple.__new__
_NOTHING = Entry()
_NOBODY = (None,) * 6


class World:
    """All that the records of one partition of the log have said so far."""

    __slots__ = ("entries", "next_offset", "now_ms", "partitions", "pauses", "place")

    def __init__(self, place: int) -> None:
        self.place = place
        """The partition of the log."""
        self.next_offset = 0
        """The offset of the record that comes next."""
        self.now_ms = 0
        """The time of the log."""
        self.partitions: int | None = None
        """How many partitions the log has, as its first message says."""
        self.entries: dict[Shared, Entry] = {}
        self.pauses: dict[str, Pause] = {}

    def copy(self) -> Self:
        """Copy it: what is applied to the copy leaves this one as it is."""
        other = copy.copy(self)
        other.entries = dict(self.entries)
        other.pauses = dict(self.pauses)
        return other

    def find(self, shared: Shared) -> Entry:
        """Return what is known of a partition."""
        return self.entries.get(shared, _NOTHING)

    def is_paused(self, group_id: str) -> bool:
        """Whether a group is paused now."""
        pause = self.pauses.get(group_id)
        return pause is not None and self.now_ms < pause.until_ms

    def has_paused(self, sender: Sender) -> bool:
        """Whether this run of this member has paused its group, and it is paused."""
        pause = self.pauses.get(sender.group_id)
        return (
            pause is not None
            and self.now_ms < pause.until_ms
            and sender[1:] == (pause.client_id, pause.instance_id)
        )

    def judge(self, sender: Sender, shared: Shared) -> Outcome:
        """Say what a claim of the sender would do if it were the next record, now."""
        if self.is_paused(shared.group_id) and not self.has_paused(sender):
            return Outcome.PAUSED
        holding = self.find(shared).holding
        if holding is None:
            return Outcome.VALID
        freshness = holding.find_freshness(self.now_ms)
        if freshness is Freshness.STALE:
            return Outcome.VALID
        is_restart = (
            holding.client_id == sender.client_id
            and holding.instance_id != sender.instance_id
        )
        if is_restart and freshness is not Freshness.FRESH:
            return Outcome.VALID
        return Outcome.HELD

    def apply(self, offset: int, time_ms: int, value: bytes | None) -> Outcome:
        """Apply the next record, given as Kafka has it."""
        read = decode(value)
        if isinstance(read, Unreadable):
            self.pass_over(offset, time_ms)
            return Outcome.UNREADABLE
        return self.fold(offset, time_ms, *read)

    def pass_over(self, offset: int, time_ms: int) -> None:
        """Move the time alone."""
        self.next_offset = offset + 1
        if time_ms > self.now_ms:
            self.now_ms = time_ms

    def fold(
        self, offset: int, time_ms: int, partitions: int, message: Message
    ) -> Outcome:
        """Apply the next record: its sender has seen so many partitions of the log."""
        self.next_offset = offset + 1
        if time_ms > self.now_ms:
            self.now_ms = time_ms
        if partitions != self.partitions:
            if self.partitions is not None:
                return Outcome.OTHER_COUNT
            self.partitions = partitions
        if not isinstance(message, Heartbeat):  # Nearly all are.
            if isinstance(message, (Probe, Snapshot)):
                return Outcome.VALID
            if isinstance(message, ReleaseGroup):
                return self._pause(message)
        topic, partition = message.shared[1:]
        if find_place(topic, partition, partitions) != self.place:
            return Outcome.OTHER_PLACE
        if isinstance(message, Heartbeat):
            return self._keep(message)
        if isinstance(message, ClaimingPartition):
            return self._claim(offset, message)
        if isinstance(message, ClaimingMessages):
            return self._claim_messages(message)
        return self._release(message)

    def _keep(self, message: Heartbeat) -> Outcome:
        sender, shared, claim, told = message
        position, holding = self.entries.get(shared, _NOTHING)
        if holding is None or holding.claim != claim or not holding.is_of(sender):
            return Outcome.NOT_HELD
        if told is not None and (position is None or told > position):
            position = told
        self._confirm(shared, position, holding)
        return Outcome.VALID

    def _confirm(self, shared: Shared, position: int | None, holding: Holding) -> None:
        client_id, instance_id, claim, interval_ms, _, _ = holding
        # Nearly all records come here: a named tuple's own constructor is slow.
        kept = _new(
            Holding, (client_id, instance_id, claim, interval_ms, self.now_ms, True)
        )
        self.entries[shared] = _new(Entry, (position, kept))

    def _claim_messages(self, message: ClaimingMessages) -> Outcome:
        entry = self.find(message.shared)
        holding = entry.holding
        if (
            holding is None
            or holding.claim != message.claim
            or not holding.is_of(message.sender)
        ):
            return Outcome.NOT_HELD
        if (refusal := self._refuse(entry, holding, message)) is not None:
            return refusal
        self._confirm(message.shared, message.end, holding)
        return Outcome.VALID

    def _release(self, message: ReleasingPartition) -> Outcome:
        sender, shared, claim, told = message
        position, holding = self.find(shared)
        if holding is None or holding.claim != claim or not holding.is_of(sender):
            return Outcome.NOT_HELD
        if told is not None and (
            position is None or told > position or self.has_paused(sender)
        ):
            position = told
        self.entries[shared] = Entry(position)
        return Outcome.VALID

    def _pause(self, message: ReleaseGroup) -> Outcome:
        group_id, client_id, instance_id = message.sender
        self.pauses[group_id] = Pause(message.msg_expire_time, client_id, instance_id)
        return Outcome.VALID

    def _claim(self, offset: int, message: ClaimingPartition) -> Outcome:
        sender, shared, interval_ms = message
        outcome = self.judge(sender, shared)
        if outcome is Outcome.VALID:
            holding = Holding(
                sender.client_id,
                sender.instance_id,
                offset,
                interval_ms,
                self.now_ms,
                confirmed=False,
            )
            self.entries[shared] = Entry(self.find(shared).position, holding)
        return outcome

    def _refuse(
        self, entry: Entry, holding: Holding, message: ClaimingMessages
    ) -> Outcome | None:
        if not holding.confirmed:
            return Outcome.UNCONFIRMED
        if self.is_paused(message.shared.group_id):
            return Outcome.PAUSED
        if message.first != entry.position or message.end <= (message.first or 0):
            return Outcome.NOT_NEXT
        return None

    # Snapshots

    def spell(self) -> tuple[list[str], str, str]:
        """Spell it as snapshots do: the line of each entry, all pauses, and the digest.

        Worlds that are equal spell the same.
        """
        entries = [
            _spell_line([*shared, entry.position, *(entry.holding or _NOBODY)])
            for shared, entry in sorted(self.entries.items())
        ]
        pauses = "".join(
            _spell_line([group, *pause])
            for group, pause in sorted(self.pauses.items())
            if self.now_ms < pause.until_ms
        )
        return entries, pauses, find_digest(entries, pauses)

    def restore(self, entries: str, pauses: str) -> None:
        """Take over what a snapshot says. Its caller has checked the digest.

        Raises:
            ValueError: it is no snapshot.
        """
        for line in _list_lines(entries):
            shared, entry = _read_entry(line)
            if shared in self.entries:
                raise ValueError(f"{shared} comes twice")
            self.entries[shared] = entry
        for line in _list_lines(pauses):
            group, pause = _read_pause(line)
            if group in self.pauses:
                raise ValueError(f"the pause of {group!r} comes twice")
            self.pauses[group] = pause


def find_digest(entries: Iterable[str], pauses: str) -> str:
    """Find the digest of a snapshot's lines."""
    digest = sha256()
    for line in entries:
        digest.update(line.encode())
    digest.update(pauses.encode())
    return digest.hexdigest()


def _list_lines(text: str) -> list[str]:
    lines = text.split("\n")  # A line may hold other line ends.
    if lines.pop():
        raise ValueError("the last line has no end")
    return lines


def _read_line(line: str, count: int) -> list[Any]:
    found = from_json(line, allow_inf_nan=False)
    if type(found) is not list or len(found) != count:
        raise ValueError(f"a line must be a list of {count} values")
    return found


def _read_entry(line: str) -> tuple[Shared, Entry]:
    group, topic, partition, position, *held = _read_line(line, 10)
    shared = Shared(
        as_name(group),
        as_name(topic, TOPIC_LIMIT),
        as_number(partition, LARGEST_PARTITION),
    )
    if all(one is None for one in held):
        return shared, Entry(as_position(position))
    client, instance, claim, interval_ms, last_ms, confirmed = held
    if type(confirmed) is not bool:
        raise ValueError("a holding is confirmed, or not")
    holding = Holding(
        as_name(client),
        as_name(instance),
        as_number(claim),
        as_number(interval_ms, LONGEST_INTERVAL_MS, SHORTEST_INTERVAL_MS),
        as_number(last_ms),
        confirmed,
    )
    return shared, Entry(as_position(position), holding)


def _read_pause(line: str) -> tuple[str, Pause]:
    group, until_ms, client, instance = _read_line(line, 4)
    pause = Pause(as_number(until_ms), as_name(client), as_name(instance))
    return as_name(group), pause


def _spell_line(value: list[object]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"
