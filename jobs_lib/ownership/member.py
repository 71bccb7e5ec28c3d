"""Origins follow the partitions that this process has as a member of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.ownership.source import Assignment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from confluent_kafka import Message

    from jobs_lib.kafka.member import GroupMember, Partition
    from jobs_lib.ownership.ownership import Ownership


class MemberSource:
    """Wants what the members of this process are assigned.

    The group's coordinator is the authority: what it gives is taken from anybody.
    """

    def __init__(self, members: Iterable[GroupMember], handover_timeout: float) -> None:
        self._assignment = Assignment()
        self._handover_timeout = handover_timeout
        self._changed: Callable[[], None] = lambda: None
        self._ownership: Ownership | None = None
        for member in members:
            member.listen(self)

    def serve(self, ownership: Ownership) -> None:
        """Wait for this ownership's hand-over when partitions are revoked."""
        self._ownership = ownership

    def start(self, changed: Callable[[], None]) -> None:
        """Report changes from now on; the members are started by whoever made them."""
        self._changed = changed
        changed()

    def stop(self) -> None:
        """Want nothing more."""
        self._assignment.replace(())

    @property
    def wanted(self) -> frozenset[str]:
        """The origins of the assigned partitions."""
        return self._assignment.wanted

    def claims(self, origins: Iterable[str]) -> frozenset[str]:
        """What the coordinator gave and was not taken over yet."""
        return self._assignment.claims(origins)

    def took(self, origins: Iterable[str]) -> None:
        """These were taken over."""
        self._assignment.took(origins)

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """The coordinator gave partitions."""
        self._assignment.assign(f"{topic}/{n}" for topic, n in partitions)
        self._changed()

    def revoked(self, partitions: frozenset[Partition]) -> None:
        """Partitions leave: wait, in the poll thread, until they are handed over."""
        self.lost(partitions)
        if self._ownership is not None:
            leaving = [f"{topic}/{n}" for topic, n in partitions]
            self._ownership.wait_released(leaving, 2 * self._handover_timeout)

    def lost(self, partitions: frozenset[Partition]) -> None:
        """Partitions are somebody else's already."""
        self._assignment.revoke(f"{topic}/{n}" for topic, n in partitions)
        self._changed()

    def begun(self, partition: Partition) -> None:
        """Reading is not this listener's business."""

    def received(self, messages: list[Message]) -> None:
        """Nor are records."""
