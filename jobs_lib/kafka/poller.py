"""Poll a consumer in a thread of its own: read, pause and seek partitions.

How partitions come and go is left to those who inherit: by a consumer group, or by
hand. In a group's thread runs no handler and no database call: Kafka would give its
partitions to others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from jobs_lib import telemetry
from jobs_lib.kafka.refusal import SOON, explain
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from jobs_lib.settings import Settings

Partition = tuple[str, int]
POLL_SECONDS = 0.02
_FETCH = 1_000
_REPORTED_EVERY = 1.0
_ANSWER_SECONDS = 5.0
_LEADER_SECONDS = 10.0
"""Within these, a partition finds a leader again; longer is worth a report."""
_QUIET = {KafkaError._PARTITION_EOF, KafkaError._TIMED_OUT}
_COMING = {*SOON, KafkaError._UNKNOWN_PARTITION}
"""Errors while a partition's broker comes or goes. The last is the client's own: it has
not heard of the partition again."""


class PollListener(Protocol):
    """Learns what becomes of the partitions; called in the thread that polls."""

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """React to new partitions; they are paused until :meth:`Poller.begin`."""

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
        Nothing is read before :meth:`Poller.begin` is called again.
        """

    def committed(self, offsets: dict[Partition, int]) -> None:
        """Note that the broker has acknowledged these offsets of the group."""


class Poller:
    """Reads partitions, and hands their records to listeners."""

    def __init__(self, settings: Settings, group: str, *, assigns_one: bool) -> None:
        """Prepare.

        Args:
            settings: where the brokers are.
            group: the group's name.
            assigns_one: whether partitions are assigned one by one, or all at once.
        """
        self.group = group
        self._settings = settings
        self._listeners: list[PollListener] = []
        self._commands: deque[Callable[[Consumer], bool]] = deque()
        self._assigned: set[Partition] = set()
        """Kept here, because asking librdkafka would wait while it holds the GIL."""
        self._paused: set[Partition] = set()
        self._begun: dict[Partition, int] = {}
        """Where those were begun last that were begun since they were assigned."""
        self._wanted: dict[Partition, object] = {}
        """The newest command of each partition that begins or pauses it."""
        self._out_of_range: dict[Partition, float] = {}
        """Those that librdkafka has ceased to read, and since when."""
        self._is_silent = False
        """Whether a broker has not answered in this round."""
        self._stopping = threading.Event()
        self._has_news = threading.Event()
        """Set when it is worth to poll before a rest is over."""
        self._assigns_one = assigns_one
        self._reported_at = 0.0
        self._loop = Loop(f"poll {group}", self._poll, stopping=self._stopping)
        self.pulse = self._loop.pulse

    def listen(self, listener: PollListener) -> None:
        """Add a listener; call this before :meth:`start`."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def stop(self, timeout: float | None = None) -> None:
        """Release all partitions, and end; wait for so many seconds at most."""
        self._loop.stop(timeout)

    def begin(self, partition: Partition, offset: int | None) -> None:
        """Start to read an assigned partition from ``offset``.

        None means the oldest record that there is. The group's offset in Kafka is never
        asked for: it may be one of a database that there is no more.
        """
        at = TopicPartition(*partition, OFFSET_BEGINNING if offset is None else offset)

        def seek(consumer: Consumer) -> bool:
            # One that came too early must not undo a newer one.
            if partition not in self._assigned or self._wanted[partition] is not seek:
                return True
            try:
                if partition in self._out_of_range:
                    self._assign_again(consumer, at)
                elif offset is not None or partition in self._begun:
                    consumer.seek(at)
                # Else it was assigned at its beginning.
                consumer.resume([TopicPartition(*partition)])
                self._paused.discard(partition)
                self._begun[partition] = at.offset
            except KafkaException as error:
                # The partition's fetcher has not started yet: try again.
                if error.args[0].code() == KafkaError._STATE:
                    return False
                raise
            for listener in self._listeners:
                listener.begun(partition)
            return True

        self._wanted[partition] = seek
        self._commands.append(seek)

    def get_begun(self, partition: Partition) -> int:
        """Get where a partition was begun last; call it in the poll thread."""
        return self._begun[partition]

    def pause(self, partition: Partition) -> None:
        """Stop fetching records of a partition for now."""

        def pause(consumer: Consumer) -> bool:
            if partition in self._assigned and self._wanted[partition] is pause:
                consumer.pause([TopicPartition(*partition)])
                self._paused.add(partition)
            return True

        self._wanted[partition] = pause
        self._commands.append(pause)

    def ask_range(self, partition: Partition) -> None:
        """Ask which records an assigned partition has, before it is begun again.

        Listeners are told as if the partition were out of range.
        """

        def ask(consumer: Consumer) -> bool:
            if partition not in self._assigned:
                return True
            self._out_of_range.setdefault(partition, time.monotonic())
            return self._tell_range(partition, None, consumer)

        self._commands.append(ask)

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
        raise NotImplementedError

    def _check(self, error: KafkaError) -> None:
        """Raise an error that ends the work of this client."""

    def _obey(self, consumer: Consumer) -> None:
        """Run the commands of other threads; keep those that come too early.

        A broker that does not answer is waited for once in a round: Kafka takes all
        partitions from a member that does not poll.
        """
        self._is_silent = False
        unanswered: list[Callable[[Consumer], bool]] = []
        for _ in range(len(self._commands)):
            command, was_silent = self._commands.popleft(), self._is_silent
            if not command(consumer):
                is_unanswered = self._is_silent and not was_silent
                (unanswered if is_unanswered else self._commands).append(command)
            self.pulse.beat()
        # The next round begins with another one, whose broker may answer.
        self._commands.extend(unanswered)

    def _poll_once(self, consumer: Consumer, wait: float = POLL_SECONDS) -> None:
        self._obey(consumer)
        if not all(listener.has_room() for listener in self._listeners):
            self._has_news.wait(wait)
            self._has_news.clear()
            return
        # poll() returns at the first record; consume() alone would wait for more
        # records until its timeout.
        try:
            first = consumer.poll(wait)
            if first is None:
                return
            messages = [first, *consumer.consume(_FETCH, 0)]
        except KafkaException as failure:
            self._check(failure.args[0])
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
        self._check(error)
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            partition = (message.topic() or "", message.partition() or 0)
            self._out_of_range[partition] = time.monotonic()
            tell = partial(self._tell_range, partition, message.offset())
            self._commands.append(tell)
        elif error.code() not in _QUIET:
            # An error without a topic is about the group.
            name = message.topic() or self.group
            self._report(explain(error, self._settings, name, "READ"))

    def _tell_range(
        self, partition: Partition, refused: int | None, consumer: Consumer
    ) -> bool:
        """Tell listeners which records there are; False if the broker does not say.

        Args:
            partition: which cannot be read on.
            refused: the offset that the broker has refused; None if it was only asked.
            consumer: asks the broker.
        """
        if partition not in self._out_of_range:
            return True
        if self._is_silent or self._stopping.is_set():
            return False
        asked_at = time.monotonic()
        try:
            start, end = consumer.get_watermark_offsets(
                TopicPartition(*partition), timeout=_ANSWER_SECONDS
            )
        except KafkaException as failure:
            error: KafkaError = failure.args[0]
            now = time.monotonic()
            is_late = now > asked_at + _ANSWER_SECONDS / 2
            self._is_silent = is_late or error.code() == KafkaError._TIMED_OUT
            waited = now - self._out_of_range[partition]
            if error.code() not in _COMING or waited > _LEADER_SECONDS:
                topic = partition[0]
                self._report_sometimes(explain(error, self._settings, topic, "READ"))
            return False
        if refused is not None and refused >= start:
            # The partition ended before it then, however far it has grown since.
            end = max(start, min(end, refused - 1))
        for listener in self._listeners:
            listener.out_of_range(partition, start, end)
        return True

    def _assign_again(self, consumer: Consumer, at: TopicPartition) -> None:
        """Read a partition again that was out of range: librdkafka refuses to seek."""
        partition = (at.topic, at.partition)
        self._out_of_range.pop(partition, None)
        if self._assigns_one:
            consumer.incremental_unassign([at])
            consumer.incremental_assign([at])
            return
        # All others go on from where they are. Those that nothing was read of have no
        # place yet: without an offset, the client would ask Kafka for the group's.
        others = [TopicPartition(*one) for one in self._assigned if one != partition]
        places = consumer.position(others) if others else []
        for one in places:
            if one.offset < 0:
                begun = self._begun.get((one.topic, one.partition), OFFSET_BEGINNING)
                one.offset = begun
        consumer.assign([at, *places])
        if self._paused:
            consumer.pause([TopicPartition(*one) for one in self._paused])

    def _report_sometimes(self, error: Exception) -> None:
        """Report an error of which each attempt tells, perhaps many times a second."""
        if time.monotonic() > self._reported_at + _REPORTED_EVERY:
            self._reported_at = time.monotonic()
            self._report(error)

    def _report(self, error: BaseException) -> None:
        """Report an error and go on: a lost permission may be granted again."""
        telemetry.emit("loop.failed", loop=self._loop.name, error=error)

    def _forget(self, partitions: Collection[Partition]) -> None:
        for one in list(partitions):
            self._assigned.discard(one)
            self._paused.discard(one)
            self._begun.pop(one, None)
            self._out_of_range.pop(one, None)

    def _notify(self, what: str, partitions: list[TopicPartition]) -> None:
        parts = list_parts(partitions)
        if not parts:
            return
        for listener in self._listeners:
            try:
                getattr(listener, what)(parts)
            except Exception as error:
                telemetry.emit("loop.failed", loop=f"{what} {self.group}", error=error)


def list_parts(partitions: Iterable[TopicPartition]) -> frozenset[Partition]:
    """List the partitions of Kafka's places."""
    return frozenset((at.topic, at.partition) for at in partitions)
