"""Membership in a consumer group: a thread that only polls.

No handler and no database call runs in this thread, so none can make the group's
coordinator believe that the pod is dead. The one exception is a revocation, which waits
for the hand-over, up to its deadline.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from jobs_lib.errors import FencedError, UnavailableError
from jobs_lib.kafka.client import make_consumer
from jobs_lib.kafka.configuration import assigns_one_by_one
from jobs_lib.kafka.poller import POLL_SECONDS, Poller, list_parts
from jobs_lib.kafka.poller import Partition as Partition
from jobs_lib.kafka.refusal import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jobs_lib.settings import Settings

_FENCED = KafkaError(KafkaError.FENCED_INSTANCE_ID)
_UNRELEASED = KafkaError(KafkaError.UNRELEASED_INSTANCE_ID)


class GroupMember(Poller):
    """One member of a consumer group."""

    def __init__(
        self,
        settings: Settings,
        group: str,
        topics: Iterable[str],
        *,
        may_join: Callable[[], bool] = lambda: True,
        fenced: Callable[[FencedError], None] = lambda error: None,
        mark: str = "",
    ) -> None:
        """Prepare to join.

        Args:
            settings: where the brokers are, and how the group shares partitions.
            group: the group's name.
            topics: all topics that this member subscribes to.
            may_join: called again and again; while it returns False, the member stays
                out of the group, and others have its partitions.
            fenced: called when the broker has given this member's place to another
                process of the same name. The member then ends for good.
            mark: the metadata of all offsets that it commits.
        """
        super().__init__(settings, group, assigns_one=assigns_one_by_one(settings))
        self.topics = sorted(topics)
        self._commits: deque[list[TopicPartition]] = deque()
        self._may_join = may_join
        self._fenced = fenced
        self._mark = mark
        self._leaves_at_once = False

    def may_oust(self, partition: Partition) -> bool:
        """Whether an assigned partition may be taken from an owner that lives."""
        return True

    def commit(self, offsets: dict[Partition, int]) -> None:
        """Commit offsets to Kafka, for lag tools and gates, without waiting for it.

        Listeners learn of those that were acknowledged.
        """
        self._commits.append(
            [
                TopicPartition(*partition, offset, self._mark)
                for partition, offset in offsets.items()
            ]
        )

    # The poll thread

    def _poll(self) -> Iterator[None]:
        while not self._stopping.is_set():
            try:
                if self._may_join():
                    yield from self._be_member()
                else:
                    self.pulse.beat()
                    self._stopping.wait(POLL_SECONDS)
            except FencedError as error:
                # For good: another process has this member's place.
                self._report(error)
                self._fenced(error)
                return

    def _be_member(self) -> Iterator[None]:
        """Poll until this member should leave."""
        consumer = make_consumer(
            self._settings, self.group, self._report_sometimes, self._on_commit
        )
        try:
            consumer.subscribe(
                self.topics,
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
            while not self._stopping.is_set() and self._may_join():
                self._poll_once(consumer)
                yield
            # Without the database no hand-over is possible, so do not wait for one.
            self._leaves_at_once = not self._stopping.is_set()
        finally:
            # This releases everything through on_revoke, and leaves the group.
            consumer.close()
            self._leaves_at_once = False
            self._commands.clear()
            self._commits.clear()
            self._forget(self._assigned)

    def _obey(self, consumer: Consumer) -> None:
        self._commit(consumer)
        super()._obey(consumer)

    def _commit(self, consumer: Consumer) -> None:
        for _ in range(len(self._commits)):
            places = self._commits.popleft()
            ours = [at for at in places if (at.topic, at.partition) in self._assigned]
            if ours:
                consumer.commit(offsets=ours, asynchronous=True)

    def _check(self, error: KafkaError) -> None:
        pod, group = self._settings.pod, self.group
        if _is(error, _FENCED):
            raise FencedError(
                f"the broker has given the place of {pod!r} in the group {group!r} to "
                f"another process of that name ({error.str()}): give each pod its own "
                "JOBS_LIB_POD"
            )
        # This client can do no more, and the next one may be let in.
        if _is(error, _UNRELEASED):
            raise UnavailableError(
                f"another process of the name {pod!r} is still a member of the group "
                f"{group!r}: if it was killed, the broker frees its place when its "
                "session is over; if it lives, give each pod its own JOBS_LIB_POD"
            )
        if _is_fatal(error):
            raise explain(error, self._settings, group, "READ")

    def _on_commit(
        self, error: KafkaError | None, partitions: list[TopicPartition]
    ) -> None:
        if error is not None:
            return  # the offsets are committed again
        done = {
            (at.topic, at.partition): at.offset for at in partitions if not at.error
        }
        for listener in self._listeners:
            listener.committed(done)

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # The database says where to go on. So Kafka's offset is not asked for.
        for at in partitions:
            at.offset = OFFSET_BEGINNING
        if self._assigns_one:
            consumer.incremental_assign(partitions)
        else:
            consumer.assign(partitions)
            self._forget(self._assigned)
        self._assigned |= list_parts(partitions)
        # Read nothing before the database has given the offset to go on from.
        consumer.pause(partitions)
        self._paused |= list_parts(partitions)
        self._notify("assigned", partitions)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # This waits for handlers, up to the deadline of each listener.
        with self.pulse.elsewhere():
            self._notify("lost" if self._leaves_at_once else "revoked", partitions)
        # Commit the offsets that were stored meanwhile, while this is still allowed. Of
        # the commands nothing else: librdkafka, when it closes, may never answer one
        # that assigns (its issue 4527 is alike), and all threads would wait for it.
        self._commit(consumer)
        self._unassign(consumer, partitions)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._notify("lost", partitions)
        self._unassign(consumer, partitions)

    def _unassign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._assigns_one:
            consumer.incremental_unassign(partitions)
            self._forget(list_parts(partitions))
        else:
            consumer.unassign()
            self._forget(self._assigned)


def _is(error: KafkaError, wanted: KafkaError) -> bool:
    """Whether an error is this one, or a fatal one whose cause it is.

    Of the cause of a fatal error the client gives the text alone.
    """
    if error.code() == wanted.code():
        return True
    return _is_fatal(error) and wanted.str() in error.str()


def _is_fatal(error: KafkaError) -> bool:
    return error.fatal() or error.code() == KafkaError._FATAL
