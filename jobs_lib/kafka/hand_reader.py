"""Read partitions that are assigned by hand: no group is joined, nothing is stored.

Nobody misses a member that does not poll for long. So what was read may be worked off
in the thread that polls: records that go to another thread, and so to another
processor, cost half as much again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, TopicPartition

from jobs_lib.kafka.client import find_leaders, make_consumer
from jobs_lib.kafka.poller import POLL_SECONDS, Partition, Poller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from confluent_kafka import Message

    from jobs_lib.settings import Settings


class HandReader(Poller):
    """Reads those partitions that it is told to."""

    def __init__(
        self, settings: Settings, group: str, work: Callable[[], float]
    ) -> None:
        """Prepare.

        Args:
            settings: where the brokers are.
            group: names the client.
            work: called after each poll; returns for how many seconds it has nothing
                to do unless records come.
        """
        super().__init__(settings, group, assigns_one=True)
        self._work = work

    @property
    def is_stopping(self) -> bool:
        """Whether the thread is to end."""
        return self._stopping.is_set()

    def assign(self, partition: Partition, offset: int) -> None:
        """Read a partition from an offset on, which may be one of Kafka's own.

        Listeners learn that it has begun. They are told that it is ``lost`` if the
        client fails, and assign it again.
        """

        def assign(consumer: Consumer) -> bool:
            at = TopicPartition(*partition, offset)
            if partition in self._assigned:
                consumer.incremental_unassign([at])
            self._forget([partition])
            if not self._assigned:
                find_leaders(consumer, [at])
            # First: if the client fails at it, listeners learn that it is lost.
            self._assigned.add(partition)
            consumer.incremental_assign([at])
            # The client keeps it in mind that a partition was paused, also without it.
            consumer.resume([at])
            self._begun[partition] = offset
            for listener in self._listeners:
                listener.begun(partition)
            return True

        # One that came too early must not move it afterwards.
        self._wanted[partition] = assign
        self._commands.append(assign)
        self.poll_soon()

    def unassign(self, partition: Partition) -> None:
        """Read a partition no more."""

        def unassign(consumer: Consumer) -> bool:
            if partition in self._assigned:
                consumer.incremental_unassign([TopicPartition(*partition)])
                self._forget([partition])
            return True

        self._commands.append(unassign)

    def _note_error(self, message: Message, error: KafkaError) -> None:
        # The client asks for a group that it never joins, and reads on.
        if error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
            super()._note_error(message, error)

    def _poll(self) -> Iterator[None]:
        consumer = make_consumer(
            self._settings, self.group, self._report_sometimes, joins=False
        )
        wait = 0.0
        try:
            while not self._stopping.is_set():
                self._poll_once(consumer, min(wait, POLL_SECONDS))
                wait = self._work()
                yield
        finally:
            consumer.close()
            places = [TopicPartition(*one) for one in self._assigned]
            self._forget(self._assigned)
            self._notify("lost", places)
