"""Tombstones without a version, in topics whose states have one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.outbox.block import VALUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

    from jobs_lib.outbox.block import Block, LiveRow, OutboxRecord
    from jobs_lib.outbox.topic import Topic


class Unversioned:
    """Reports such tombstones, once for each topic; the threads of a relay share it."""

    def __init__(self, topics: Mapping[str, Topic[Any]]) -> None:
        self._versioned = {name for name, topic in topics.items() if topic.versioned}
        self._reported: set[str] = set()

    def drop(self, block: Block, found: Iterable[OutboxRecord]) -> None:
        """Drop tombstones of a re-export that have no version.

        Consumers would use the offset as the version, and might then refuse the states
        of a key that comes back. They lose nothing: the deletion itself was a row, too.
        """
        block.drop(
            record
            for record in found
            if record.value is None
            and record.version is None
            and record.topic in self._versioned
        )

    def report_tombstones(self, rows: list[LiveRow], topics: Set[str]) -> None:
        """Report versioned topics that get a tombstone without a version."""
        # Most blocks hold no null, so their rows are not searched one by one.
        unreported = self._versioned - self._reported
        if unreported.isdisjoint(topics) or None not in map(VALUE, rows):
            return
        for row_id, _, topic, _, value, _, version, entity, _, held, _ in rows:
            # The value of a held row may not have been read, and an entity's tombstone
            # gets its version only when its state is read.
            if value is None and version is None and not (entity or held):
                self.report(topic, None, row_id)

    def report(self, topic: str, entity: str | None, row_id: int) -> None:
        """Report a tombstone without a version, if its topic's states have one."""
        if topic in self._versioned and topic not in self._reported:
            self._reported.add(topic)
            telemetry.emit("version.missing", topic=topic, entity=entity, row=row_id)
