"""A block: rows of one shard, made into records that are ready to be sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LIVE, BATCH = 0, 1
"""The classes of rows: live ones leave before those of re-exports."""

Headers: TypeAlias = "list[tuple[str, str | bytes | None]]"
Row: TypeAlias = "tuple[int, int]"
"""(class, id) of a row of the outbox."""


@dataclass(slots=True)
class Sendable:
    """One record as the producer takes it, and the rows that it stands for."""

    topic: str
    key: str | None
    value: bytes | None
    headers: Headers
    rows: list[Row]
    entity: str | None = None
    """Whose state at this time is the value."""


class Hold(NamedTuple):
    """What keeps rows back: those of a key, one without a key, or a whole topic's."""

    topic: str
    key: str | None
    """None where it is one row, or the whole topic."""
    row_id: int | None
    """Of a row without a key."""
    error: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A record that is not taken."""

    record: Sendable
    error: str
    whole_topic: bool = False
    """Whether no record of the topic would be taken now."""

    @property
    def hold(self) -> Hold:
        """What follows from it."""
        record = self.record
        if self.whole_topic:
            return Hold(record.topic, None, None, self.error)
        row_id = record.rows[0][1] if record.key is None else None
        return Hold(record.topic, record.key, row_id, self.error)

    def keeps_back(self, record: Sendable) -> bool:
        """Whether another record has to wait, too."""
        if record.topic != self.record.topic:
            return False
        key = self.record.key
        return self.whole_topic or (key is not None and record.key == key)


@dataclass(slots=True)
class Block:
    """What goes out in one Kafka transaction, and the rows that it empties."""

    records: list[Sendable] = field(default_factory=list)
    dropped: list[Row] = field(default_factory=list)
    """Rows that are done without a record."""
    refusals: list[Refusal] = field(default_factory=list)
    """Records that are not to be sent."""
    behind: list[Row] = field(default_factory=list)
    """Rows that wait behind others."""
    reexports: set[int] = field(default_factory=set)
    """The re-exports that rows of the block belong to: these may be their last ones."""

    @property
    def rows(self) -> list[Row]:
        """Every row that is done once the records are in Kafka."""
        return [row for record in self.records for row in record.rows] + self.dropped

    def __bool__(self) -> bool:
        return bool(self.records or self.dropped or self.refusals or self.behind)

    def refuse(self, refusal: Refusal) -> None:
        """Take out a record that is not to be sent, and what waits behind it."""
        self.keep(others(self.records, [refusal]), [refusal])

    def keep(self, sent: list[Sendable], refusals: Sequence[Refusal]) -> None:
        """Keep these records; the others are refused, or wait behind those that are."""
        if not refusals:
            return
        known = {id(one) for one in sent} | {id(one.record) for one in refusals}
        for record in self.records:
            if id(record) not in known:
                self.behind += record.rows
        self.records = sent
        self.refusals += refusals


def others(records: Iterable[Sendable], refusals: Sequence[Refusal]) -> list[Sendable]:
    """The records that none of the refused ones keeps back; nor those themselves."""
    return [
        record
        for record in records
        if not any(
            record is refusal.record or refusal.keeps_back(record)
            for refusal in refusals
        )
    ]
