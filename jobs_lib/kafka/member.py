"""Membership in a consumer group: a thread that only polls.

No handler and no database call runs in this thread, so none can make the group's
coordinator believe that the pod is dead. The one exception is a revocation, which waits
for the hand-over, up to its deadline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from jobs_lib import telemetry
from jobs_lib.errors import FencedError
from jobs_lib.kafka.client import make_consumer
from jobs_lib.kafka.refusal import SOON, explain
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from jobs_lib.settings import Settings

Partition = tuple[str, int]
_POLL_SECONDS = 0.02
_FETCH = 1_000
_REPORTED_EVERY = 1.0
_ANSWER_SECONDS = 5.0
_LEADER_SECONDS = 10.0
"""Within these, a partition finds a leader again; longer is worth a report."""
_QUIET = {KafkaError._PARTITION_EOF, KafkaError._TIMED_OUT}
_FATAL = {
    KafkaError._FATAL,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.UNRELEASED_INSTANCE_ID,
}


class MemberListener(Protocol):
    """Learns what happens to a member; called in its poll thread."""

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """React to new partitions; they are paused until :meth:`GroupMember.begin`."""

    def revoked(self, partitions: frozenset[Partition]) -> None:
        """Release partitions that leave; may wait, up to the hand-over deadline."""

    def lost(self, partitions: frozenset[Partition]) -> None:
        """Release partitions that another member has already; must not wait."""

    def begun(self, partition: Partition) -> None:
        """From now on the records received begin at the requested offset."""

    def has_room(self) -> bool:
        """Whether records may arrive now; if not, it is asked again soon."""

    def received(self, messages: list[Message]) -> None:
        """Take records that arrived."""

    def out_of_range(self, partition: Partition, start: int, end: int) -> None:
        """Note that no record has the offset from which the partition should be read.

        The partition's records have the offsets from ``start`` to before ``end``.
        Nothing is read before :meth:`GroupMember.begin` is called again.
        """

    def committed(self, offsets: dict[Partition, int]) -> None:
        """Note that the broker has acknowledged these offsets of the group."""


class GroupMember:
    """One member of a consumer group."""

    def __init__(
        self,
        settings: Settings,
        group: str,
        topics: Iterable[str],
        *,
        may_join: Callable[[], bool] = lambda: True,
        fenced: Callable[[FencedError], None] = lambda error: None,
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
        """
        self.group = group
        self.topics = sorted(topics)
        self._settings = settings
        self._listeners: list[MemberListener] = []
        self._commands: deque[Callable[[Consumer], bool]] = deque()
        self._commits: deque[list[TopicPartition]] = deque()
        self._assigned: set[Partition] = set()
        """Kept here, because asking librdkafka would wait while it holds the GIL."""
        self._paused: set[Partition] = set()
        self._begun: set[Partition] = set()
        """Those that were begun since they were assigned."""
        self._out_of_range: dict[Partition, float] = {}
        """Those that librdkafka has ceased to read, and since when."""
        self._stopping = threading.Event()
        self._has_news = threading.Event()
        """Set when it is worth to poll before a rest is over."""
        self._cooperative = (
            settings.assignment_strategy == "cooperative-sticky"
            or settings.group_protocol == "consumer"
        )
        self._may_join = may_join
        self._fenced = fenced
        self._leaves_at_once = False
        self._reported_at = 0.0
        self._loop = Loop(f"poll {group}", self._poll, stopping=self._stopping)
        self.pulse = self._loop.pulse

    def listen(self, listener: MemberListener) -> None:
        """Add a listener; call this before :meth:`start`."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Join the group."""
        self._loop.start()

    def stop(self) -> None:
        """Release all partitions and leave the group."""
        self._loop.stop()

    def begin(self, partition: Partition, offset: int | None) -> None:
        """Start to read an assigned partition from ``offset``.

        None means the group's offset in Kafka. If there is none, the partition is out
        of range.
        """
        at = TopicPartition(*partition)
        if offset is not None:
            at.offset = offset

        def seek(consumer: Consumer) -> bool:
            if partition not in self._assigned:
                return True
            try:
                if partition in self._out_of_range:
                    self._assign_again(consumer, at)
                elif offset is not None:
                    consumer.seek(at)
                elif partition in self._begun:
                    # The client is somewhere behind the group's offset.
                    self._assign_again(consumer, at)
                consumer.resume([TopicPartition(*partition)])
                self._paused.discard(partition)
                self._begun.add(partition)
            except KafkaException as error:
                # The partition's fetcher has not started yet: try again.
                if error.args[0].code() == KafkaError._STATE:
                    return False
                raise
            for listener in self._listeners:
                listener.begun(partition)
            return True

        self._commands.append(seek)

    def pause(self, partition: Partition) -> None:
        """Stop fetching records of a partition for now."""

        def pause(consumer: Consumer) -> bool:
            if partition in self._assigned:
                consumer.pause([TopicPartition(*partition)])
                self._paused.add(partition)
            return True

        self._commands.append(pause)

    def commit(self, offsets: dict[Partition, int]) -> None:
        """Commit offsets to Kafka, for lag tools and gates, without waiting for it.

        Listeners learn of those that were acknowledged.
        """
        self._commits.append(
            [TopicPartition(t, p, offset) for (t, p), offset in offsets.items()]
        )

    def poll_soon(self) -> None:
        """Poll again soon: a listener may have room for records now."""
        self._has_news.set()

    def ask_positions(self, answer: Callable[[dict[Partition, int]], object]) -> None:
        """Ask how far the assigned partitions are read; answered in the poll thread.

        Every record before these offsets was handed to the listeners. Those partitions
        are left out of which nothing was read yet.
        """

        def tell(consumer: Consumer) -> bool:
            places = [TopicPartition(*one) for one in self._assigned]
            found = consumer.position(places) if places else []
            answer(
                {(at.topic, at.partition): at.offset for at in found if at.offset >= 0}
            )
            return True

        self._commands.append(tell)

    # The poll thread

    def _poll(self) -> Iterator[None]:
        while not self._stopping.is_set():
            try:
                if self._may_join():
                    yield from self._be_member()
                else:
                    self.pulse.beat()
                    self._stopping.wait(_POLL_SECONDS)
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
        """Run the commands of other threads; keep those that come too early."""
        self._commit(consumer)
        for _ in range(len(self._commands)):
            command = self._commands.popleft()
            if not command(consumer):
                self._commands.append(command)

    def _commit(self, consumer: Consumer) -> None:
        for _ in range(len(self._commits)):
            places = self._commits.popleft()
            ours = [at for at in places if (at.topic, at.partition) in self._assigned]
            if ours:
                consumer.commit(offsets=ours, asynchronous=True)

    def _poll_once(self, consumer: Consumer) -> None:
        self._obey(consumer)
        if not all(listener.has_room() for listener in self._listeners):
            self._has_news.wait(_POLL_SECONDS)
            self._has_news.clear()
            return
        # poll() returns at the first record; consume() alone would wait for more
        # records until its timeout.
        try:
            first = consumer.poll(_POLL_SECONDS)
            if first is None:
                return
            messages = [first, *consumer.consume(_FETCH, 0)]
        except KafkaException as failure:
            self._check_place(failure.args[0])
            raise
        records = [message for message in messages if message.error() is None]
        if len(records) < len(messages):
            for message in messages:
                if (error := message.error()) is not None:
                    self._note_error(message, error)
        if records:
            for listener in self._listeners:
                listener.received(records)

    def _note_error(self, message: Message, error: KafkaError) -> None:
        self._check_place(error)
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            partition = (message.topic() or "", message.partition() or 0)
            self._out_of_range[partition] = time.monotonic()
            self._commands.append(partial(self._tell_range, partition))
        elif error.code() not in _QUIET:
            # An error without a topic is about the group.
            name = message.topic() or self.group
            self._report(explain(error, self._settings, name, "READ"))

    def _tell_range(self, partition: Partition, consumer: Consumer) -> bool:
        """Tell listeners which records there are; False if the broker does not say."""
        if partition not in self._out_of_range:
            return True
        try:
            start, end = consumer.get_watermark_offsets(
                TopicPartition(*partition), timeout=_ANSWER_SECONDS
            )
        except KafkaException as failure:
            error: KafkaError = failure.args[0]
            waited = time.monotonic() - self._out_of_range[partition]
            # The partition's broker may have just come or gone: ask again.
            if error.code() not in SOON or waited > _LEADER_SECONDS:
                topic = partition[0]
                self._report_sometimes(explain(error, self._settings, topic, "READ"))
            return False
        for listener in self._listeners:
            listener.out_of_range(partition, start, end)
        return True

    def _assign_again(self, consumer: Consumer, at: TopicPartition) -> None:
        """Read a partition again that was out of range: librdkafka refuses to seek."""
        partition = (at.topic, at.partition)
        self._out_of_range.pop(partition, None)
        if self._cooperative:
            consumer.incremental_unassign([at])
            consumer.incremental_assign([at])
            return
        # All others go on from where they are. One that has no place yet goes on from
        # its offset in Kafka, which is never ahead of what its listener wants.
        others = [TopicPartition(*one) for one in self._assigned if one != partition]
        consumer.assign([at, *(consumer.position(others) if others else ())])
        if self._paused:
            consumer.pause([TopicPartition(*one) for one in self._paused])

    def _check_place(self, error: KafkaError) -> None:
        if error.fatal() or error.code() in _FATAL:
            raise FencedError(
                f"the broker has given the place of {self._settings.pod!r} in the "
                f"group {self.group!r} to another process of that name "
                f"({error.str()}): give each pod its own JOBS_LIB_POD"
            )

    def _report_sometimes(self, error: Exception) -> None:
        """Report an error of which each attempt tells, perhaps many times a second."""
        if time.monotonic() > self._reported_at + _REPORTED_EVERY:
            self._reported_at = time.monotonic()
            self._report(error)

    def _report(self, error: BaseException) -> None:
        """Report an error and go on: a lost permission may be granted again."""
        telemetry.emit("loop.failed", loop=self._loop.name, error=error)

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
        if self._cooperative:
            consumer.incremental_assign(partitions)
        else:
            consumer.assign(partitions)
            self._forget(self._assigned)
        self._assigned |= _parts(partitions)
        # Read nothing before the database has given the offset to go on from.
        consumer.pause(partitions)
        self._paused |= _parts(partitions)
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
        if self._cooperative:
            consumer.incremental_unassign(partitions)
            self._forget(_parts(partitions))
        else:
            consumer.unassign()
            self._forget(self._assigned)

    def _forget(self, partitions: Collection[Partition]) -> None:
        for one in list(partitions):
            self._assigned.discard(one)
            self._paused.discard(one)
            self._begun.discard(one)
            self._out_of_range.pop(one, None)

    def _notify(self, what: str, partitions: list[TopicPartition]) -> None:
        parts = _parts(partitions)
        if not parts:
            return
        for listener in self._listeners:
            try:
                getattr(listener, what)(parts)
            except Exception as error:
                telemetry.emit("loop.failed", loop=f"{what} {self.group}", error=error)


def _parts(partitions: Iterable[TopicPartition]) -> frozenset[Partition]:
    return frozenset((at.topic, at.partition) for at in partitions)
