"""Consume, process and produce within Kafka's own transactions.

The events of a block of records and the group's offset are committed in one transaction
of a producer. Two fences keep processes apart: an older producer of the same
transactional id is refused, and so are offsets of a member that has lost its
partitions.

The offsets are in Kafka alone. What is committed with them names the id of their topic,
so that nobody takes them for those of a topic that was made anew.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.consuming.transaction_writer import RefusedEventsError, TransactionWriter
from jobs_lib.errors import OffsetError
from jobs_lib.kafka.client import make_consumer
from jobs_lib.kafka.configuration import assigns_one_by_one
from jobs_lib.kafka.refusal import explain
from jobs_lib.kafka.shared_groups import mark_commits, read_topic_id
from jobs_lib.kafka.topic_ids import TopicIds
from jobs_lib.loop import Loop
from jobs_lib.masking import describe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from uuid import UUID

    from confluent_kafka import Consumer, Message

    from jobs_lib.consuming.transactional import Transactional
    from jobs_lib.settings import Settings
    from jobs_lib.streams.event import Event

Partition = tuple[str, int]
_POLL_SECONDS = 0.1
_MOST_RECORDS = 500
_QUIET = {KafkaError._PARTITION_EOF, KafkaError._TIMED_OUT}
_REPLACED = (
    "the topic was deleted and made anew: the function begins with its oldest record"
)


class Transactor:
    """Runs one declared function, in a thread of its own.

    Args:
        settings: where Kafka is, and how long a block may take.
        declared: the function, its topic and its group.
        installation: the database's identity, a part of the transactional id, and the
            mark of what it commits.
        process: names this process among those of the group; stable over restarts.
        largest: bytes that an event may have; 0 leaves that to the client.
    """

    def __init__(
        self,
        settings: Settings,
        declared: Transactional,
        installation: UUID,
        process: str,
        *,
        largest: int = 0,
    ) -> None:
        self._settings = settings
        self._declared = declared
        self._installation = installation
        self._ids = TopicIds(settings, [declared.topic])
        self._topic_id: UUID | None = None
        """Of the topic whose offsets are in ``_next``, as far as it is known."""
        stopping = threading.Event()
        # Before the offsets are read, what a dead process has left open must be over.
        # So it ends before Kafka gives the partitions of a dead member to another one.
        self._writer = TransactionWriter(
            settings,
            f"jobs_lib-{installation}-{declared.group}-{process}",
            stopping,
            largest=largest,
        )
        self._assigns_one = assigns_one_by_one(settings)
        self._next: dict[Partition, int] = {}
        """Of each partition that is ours, the offset to go on from."""
        self._failures: dict[Partition, int] = {}
        """How often in a row the next record of a partition has failed."""
        self._held: dict[Partition, float] = {}
        """When partitions are tried again, by ``time.monotonic()``."""
        self._fetched: dict[Partition, list[Message]] = {}
        """The next records by partition; the one at the front has its turn."""
        name = f"transactional {declared.group}"
        self._loop = Loop(name, self._work, stopping=stopping)
        self.pulse = self._loop.pulse

    def start(self) -> None:
        """Join the group."""
        self._loop.start()

    def stop(self) -> None:
        """End the call that runs, commit what is done, and leave the group."""
        self._loop.stop(self._settings.shutdown_timeout)

    def _work(self) -> Iterator[None]:
        self._next.clear()
        self._held.clear()
        self._fetched.clear()
        consumer = None
        try:
            with self.pulse.elsewhere():
                self._writer.open()
            consumer = make_consumer(self._settings, self._declared.group)
            consumer.subscribe(
                [self._declared.topic],
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_revoke,
            )
            while not self._loop.stopping.is_set():
                self._check_topic(self._ids.poll())
                self._resume(consumer)
                self._fetch(consumer)
                self._handle_round(consumer)
                yield
        except KafkaException as failure:
            name, settings = self._declared.topic, self._settings
            raise explain(failure.args[0], settings, name, "READ") from None
        finally:
            try:
                self._writer.close()
            finally:
                # Otherwise Kafka keeps the partitions for it until its session is over.
                if consumer is not None:
                    consumer.close()

    def _check_topic(self, ids: Mapping[str, UUID]) -> None:
        """Refuse to go on in another topic of the same name.

        The client does not notice it if that has a record at the offset that comes
        next. The next client begins where the new topic does.

        Raises:
            OffsetError: it is another one.
        """
        found = ids.get(self._declared.topic)
        if found is None or found == self._topic_id:
            return
        if self._topic_id is None or not self._next:
            self._topic_id = found
            return
        for partition, following in self._next.items():
            self._tell_replaced(partition, following)
        raise OffsetError(
            f"{self._declared.topic!r}: {_REPLACED}", partition, following
        )

    def _tell_replaced(self, partition: Partition, following: int) -> None:
        telemetry.emit(
            "topic.replaced",
            group=self._declared.group,
            origin=f"{partition[0]}/{partition[1]}",
            next_offset=following,
            error=_REPLACED,
        )

    def _fetch(self, consumer: Consumer) -> None:
        """Fetch records, without those that are not to be handled."""
        waiting = bool(self._fetched)
        first = consumer.poll(0 if waiting else _POLL_SECONDS)
        if first is None:
            return
        rest = [] if waiting else consumer.consume(_MOST_RECORDS - 1, 0)
        for message in [first, *rest]:
            if (error := message.error()) is not None:
                self._check(message, error)
                continue
            partition = (message.topic() or "", message.partition() or 0)
            # Those of a partition that has left, or came and went meanwhile, are old.
            if (message.offset() or 0) >= self._next.get(partition, math.inf):
                self._fetched.setdefault(partition, []).append(message)

    def _check(self, message: Message, error: KafkaError) -> None:
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            topic, number = message.topic() or "", message.partition() or 0
            place = self._next.get((topic, number))
            raise OffsetError(
                f"the group {self._declared.group!r} should go on at offset {place} of "
                f"{topic}/{number}, and there is no record any more: set the group's "
                "offset in Kafka",
                (topic, number),
                place,
            )
        if error.code() not in _QUIET:
            raise KafkaException(error)

    def _handle_round(self, consumer: Consumer) -> None:
        """Handle partitions in turn; those for which there is no time left wait.

        Kafka takes all partitions from a member that has not polled for long. So a
        round is over soon after the call during which its time has ended, however many
        partitions there are.
        """
        until = time.monotonic() + self._settings.consumer_block_seconds
        while self._fetched:
            partition = next(iter(self._fetched))
            messages = self._fetched.pop(partition)
            self._handle(consumer, partition, messages, until)
            if self._is_over(until):
                break

    def _is_over(self, until: float) -> bool:
        return time.monotonic() > until or self._loop.stopping.is_set()

    def _handle(
        self,
        consumer: Consumer,
        partition: Partition,
        messages: list[Message],
        until: float,
    ) -> None:
        """Handle a block; what is not handled by its time is read again."""
        if partition in self._failures:
            # Only so are the records before the one that fails committed.
            messages, rest = messages[:1], messages[1:]
        else:
            rest = []
        events: list[Event] = []
        done, failure = 0, None
        for message in messages:
            try:
                with self.pulse.elsewhere():
                    events += self._declared.call(message)
            except BaseException as error:
                failure = error
                break
            done += 1
            if self._is_over(until):
                break
        if done:
            following = (messages[done - 1].offset() or 0) + 1
            try:
                self._commit(consumer, partition, events, following)
            except RefusedEventsError as error:
                done, failure = 0, error
        if failure is not None:
            self._hold(consumer, partition, failure)
        elif done:
            self._failures.pop(partition, None)
        if done < len(messages) or rest:
            consumer.seek(TopicPartition(*partition, self._next[partition]))

    def _commit(
        self,
        consumer: Consumer,
        partition: Partition,
        events: list[Event],
        following: int,
    ) -> None:
        mark = mark_commits(self._installation, self._topic_id)
        place = TopicPartition(*partition, following, mark)
        with self.pulse.elsewhere():
            self._writer.write(events, place, consumer.consumer_group_metadata())
        self._next[partition] = following
        if telemetry.listened("records.committed"):
            telemetry.emit(
                "records.committed",
                group=self._declared.group,
                origin=f"{partition[0]}/{partition[1]}",
                next_offset=following,
            )

    def _hold(
        self, consumer: Consumer, partition: Partition, error: BaseException
    ) -> None:
        """Let a partition wait whose next record fails; the others go on."""
        failures = self._failures.get(partition, 0) + 1
        self._failures[partition] = failures
        self._held[partition] = time.monotonic() + RECONNECT.delay(failures)
        consumer.pause([TopicPartition(*partition)])
        telemetry.emit(
            "record.failed",
            group=self._declared.group,
            origin=f"{partition[0]}/{partition[1]}",
            offset=self._next[partition],
            error=describe(error),
        )

    def _resume(self, consumer: Consumer) -> None:
        now = time.monotonic()
        due = [one for one, at in self._held.items() if at <= now]
        if due:
            # Nobody has read these partitions meanwhile, so no client has noticed.
            with self.pulse.elsewhere():
                ids = self._ids.read([self._declared.topic])
            self._check_topic(ids)
        for partition in due:
            del self._held[partition]
            consumer.resume([TopicPartition(*partition)])

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # Kafka answers when no transaction holds a newer offset of these.
        with self.pulse.elsewhere():
            places = consumer.committed(
                partitions, timeout=self._settings.session_timeout
            )
            ids = self._ids.read([self._declared.topic])
        self._topic_id = ids.get(self._declared.topic, self._topic_id)
        for at in places:
            if at.error is not None:
                raise KafkaException(at.error)
            if at.offset < 0:
                at.offset = OFFSET_BEGINNING
            elif self._is_of_another(at):
                self._tell_replaced((at.topic, at.partition), at.offset)
                at.offset = OFFSET_BEGINNING
        if self._assigns_one:
            consumer.incremental_assign(places)
        else:
            consumer.assign(places)
        # The client keeps it in mind that one was held when it left.
        consumer.resume(places)
        for at in places:
            self._next[at.topic, at.partition] = max(at.offset, 0)

    def _is_of_another(self, at: TopicPartition) -> bool:
        """Whether an offset was committed for the topic before this one."""
        known = read_topic_id(at.metadata)
        return None not in (known, self._topic_id) and known != str(self._topic_id)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # It is called in a poll, so no transaction is open.
        for at in partitions:
            for kept in (self._next, self._failures, self._held, self._fetched):
                kept.pop((at.topic, at.partition), None)
