"""Own the origins of the partitions that this process has as a group's member."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.ownership.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import Message

    from jobs_lib.kafka.member import GroupMember, Partition
    from jobs_lib.ownership.ownership import Ownership


class MemberSource(Source):
    """Wants the partitions assigned to the members of this process.

    The group's coordinator is the authority: what it assigns is taken even from a
    living owner. A coordination log is one only where it ousted a silent holder. This
    source does not start or stop the members; their creator does.
    """

    def __init__(self, members: Iterable[GroupMember], handover_timeout: float) -> None:
        super().__init__()
        self._handover_timeout = handover_timeout
        self._ownership: Ownership | None = None
        self._members = list(members)
        for member in self._members:
            member.listen(self)

    def serve(self, ownership: Ownership) -> None:
        """Wait for this ownership's hand-over when partitions are revoked."""
        self._ownership = ownership

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """Want partitions that the coordinator assigned."""
        unheld = {
            one
            for one in partitions
            if self._members and not any(m.may_oust(one) for m in self._members)
        }
        self.want(_origins(unheld))
        self.assign(_origins(partitions - unheld))

    def revoked(self, partitions: frozenset[Partition]) -> None:
        """Give up partitions; wait, in the poll thread, until they are handed over."""
        self.revoke(_origins(partitions))
        if self._ownership is not None:
            self._ownership.wait_released(
                _origins(partitions), 2 * self._handover_timeout
            )

    def lost(self, partitions: frozenset[Partition]) -> None:
        """Give up partitions that another member has already."""
        self.revoke(_origins(partitions))

    def begun(self, partition: Partition) -> None:
        """Do nothing: the consumer reads."""

    def has_room(self) -> bool:
        """Take as many records as there are: the consumer keeps them."""
        return True

    def received(self, messages: list[Message]) -> None:
        """Do nothing: the consumer applies records."""

    def out_of_range(self, partition: Partition, start: int, end: int) -> None:
        """Do nothing, likewise."""

    def committed(self, offsets: dict[Partition, int]) -> None:
        """Do nothing: the consumer keeps the offsets."""


def _origins(partitions: Iterable[Partition]) -> list[str]:
    return [f"{topic}/{number}" for topic, number in partitions]
