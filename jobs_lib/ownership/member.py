"""Origins follow the partitions that this process has as a member of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.ownership.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import Message

    from jobs_lib.kafka.member import GroupMember, Partition
    from jobs_lib.ownership.ownership import Ownership


class MemberSource(Source):
    """Wants what the members of this process are assigned.

    The group's coordinator is the authority: what it gives is taken from anybody. The
    members are started and stopped by whoever made them.
    """

    def __init__(self, members: Iterable[GroupMember], handover_timeout: float) -> None:
        super().__init__()
        self._handover_timeout = handover_timeout
        self._ownership: Ownership | None = None
        for member in members:
            member.listen(self)

    def serve(self, ownership: Ownership) -> None:
        """Wait for this ownership's hand-over when partitions are revoked."""
        self._ownership = ownership

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """The coordinator gave partitions."""
        self.assign(_origins(partitions))

    def revoked(self, partitions: frozenset[Partition]) -> None:
        """Partitions leave: wait, in the poll thread, until they are handed over."""
        self.revoke(_origins(partitions))
        if self._ownership is not None:
            self._ownership.wait_released(
                _origins(partitions), 2 * self._handover_timeout
            )

    def lost(self, partitions: frozenset[Partition]) -> None:
        """Partitions are somebody else's already."""
        self.revoke(_origins(partitions))

    def begun(self, partition: Partition) -> None:
        """Reading is not this listener's business."""

    def received(self, messages: list[Message]) -> None:
        """Nor are records."""


def _origins(partitions: Iterable[Partition]) -> list[str]:
    return [f"{topic}/{number}" for topic, number in partitions]
