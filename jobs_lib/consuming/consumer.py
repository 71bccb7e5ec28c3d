"""The consumer: applies a block of records and its offset in one transaction.

The poll thread (see :mod:`jobs_lib.kafka.member`) fills a queue for each partition. It
rests while the queues hold as much as may wait in memory. Worker threads take a
partition each, apply a block, and move the offset in the same transaction under the
fence. Offsets in the database win over Kafka's: they are committed to Kafka later, so
Kafka's may lag but never lead.

The offset in the database may change behind the process: an operator sets it, or a
server takes over that lacks the last commits. So the process reads it again after each
lost connection, and with each heartbeat, and goes on from where it is.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.consuming import versions
from jobs_lib.consuming.applier import Applier
from jobs_lib.consuming.commits import Commits
from jobs_lib.consuming.derived import make_derived
from jobs_lib.consuming.done import Done
from jobs_lib.consuming.failures import Failures
from jobs_lib.consuming.gated import Gated
from jobs_lib.consuming.looks import Looks
from jobs_lib.consuming.measures import Measures
from jobs_lib.consuming.offsets import Offsets
from jobs_lib.consuming.placing import Placing
from jobs_lib.consuming.progress import (
    ALL,
    FIRST_SIZE,
    FIRST_WHOLE_SIZE,
    Ahead,
    Progress,
    get_offset,
)
from jobs_lib.consuming.queues import Queues
from jobs_lib.consuming.recovery import Recovery
from jobs_lib.consuming.share import Share
from jobs_lib.consuming.subscription import BlockError
from jobs_lib.errors import JobsError, RecordError
from jobs_lib.loop import Loop
from jobs_lib.masking import describe
from jobs_lib.partitioner import split_origin

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from uuid import UUID

    from confluent_kafka import Message

    from jobs_lib.consuming.changes import Changes
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.kafka.member import GroupMember, Partition
    from jobs_lib.kafka.outside import OutsideCommitter
    from jobs_lib.kafka.positions import Positions
    from jobs_lib.kafka.topic_ids import TopicIds
    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.session import Session
    from jobs_lib.telemetry.liveness import Pulse

_LAST_SECONDS = 1.0
"""Seconds for each thread to end, after its partitions were released."""


class Consumer:
    """Applies the records of one group; a Holder of the role ``consume:<group>``."""

    def __init__(
        self,
        database: Database,
        member: GroupMember,
        declared: Iterable[Subscription],
        owner: UUID,
        *,
        block: int,
        block_seconds: float,
        prefetch_bytes: int,
        heartbeat: float,
        topic_ids: TopicIds,
        dependencies: Positions | None = None,
        refresh: float = 1.0,
        committer: OutsideCommitter | None = None,
        placed: Collection[str] = (),
        threads: int = 2,
    ) -> None:
        """Prepare to consume.

        Args:
            database: holds the offsets, and what handlers change.
            member: of the consumer group.
            declared: what to do with the records of each topic.
            owner: the process that owns the partitions.
            block: the most records of a block.
            block_seconds: a block ends after the record during which they are over.
            prefetch_bytes: what records that wait in memory may need there.
            heartbeat: seconds between two looks at the offsets in the database.
            topic_ids: asks Kafka which topics these are.
            dependencies: says how far other groups are that records wait for.
            refresh: seconds between two of its answers.
            committer: of the group ``<group>.done``; None if no topic tells it how far
                its jobs are done.
            placed: the topics whose jobs wait for other groups: they keep the places of
                their records, whether anybody tells how far they are done or not.
            threads: the number of threads that apply blocks.
        """
        self.group = member.group
        self._database = database
        self._member = member
        self._declared = {one.topic: one for one in declared}
        self._offsets = Offsets(
            database.queries,
            member.group,
            owner,
            again=any(one.is_again for one in self._declared.values()),
        )
        self._block = block
        self._applier = Applier(
            self.group, self._declared, self._offsets, block_seconds
        )
        self._placed = {
            topic
            for topic, one in self._declared.items()
            if one.done or (topic in placed and not one.is_read_model)
        }
        """The topics of which jobs keep the places of their records."""
        self._topic_ids = topic_ids
        self._queues = Queues(member, prefetch_bytes)
        self._partitions = self._queues.partitions
        self._changed = self._queues.changed
        self.measures = Measures(member, self._partitions, self._changed)
        """How far it is, and how long it was busy."""
        self._commits = Commits(member, self._changed, self.measures)
        self._looks = Looks(
            self._offsets,
            topic_ids,
            self._partitions,
            self._changed,
            self._commits,
            heartbeat,
        )
        self._failures = Failures(self.group, self._declared, self._offsets, self._move)
        self._recovery = Recovery(
            member,
            self._declared,
            self._offsets,
            self._failures,
            topic_ids.read,
            self._changed,
            self._commits,
            topic_ids.read_policy,
        )
        self._gated: Gated | None = None
        """Holds records that wait for other groups; None if none do."""
        self.measures.gated = frozenset(
            topic for topic, one in self._declared.items() if one.after
        )
        if dependencies and self.measures.gated:
            self._gated = Gated(
                self.group, self._declared.values(), self._queues, dependencies, refresh
            )
        self._done = committer and Done(
            database,
            committer,
            self.group,
            owner,
            self._find_placed,
            self.measures.find_reached,
            [one.topic for one in self._declared.values() if one.waits_for_relay],
            make_derived(self._declared.values(), dependencies),
        )
        self._next: list[Progress | None] = [None] * threads
        """For each thread the partition whose block it has read ahead."""
        self._shares: defaultdict[str, Share] = defaultdict(Share)
        """By topic."""
        self._stopping = threading.Event()
        self._loops = [
            Loop(
                f"consume {self.group}",
                partial(self._work, number),
                stopping=self._stopping,
            )
            for number in range(threads)
        ]
        member.listen(self)

    @property
    def pulses(self) -> list[Pulse]:
        """The pulses of its threads."""
        others = [self._done.pulse] if self._done else []
        return [loop.pulse for loop in self._loops] + others

    def start(self) -> None:
        """Start the worker threads; they read nothing until partitions are taken.

        After an error none runs any more.
        """
        try:
            for one in self._declared.values():
                one.open()
            for loop in self._loops:
                loop.start()
            if self._done:
                self._done.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the threads. Call after the partitions have been released."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        for loop in self._loops:
            # A handler that hangs is fenced: its partition has been released.
            loop.stop(_LAST_SECONDS)
        if self._done:
            self._done.stop()
        for one in self._declared.values():
            one.close()

    # The Holder's side, in the ownership's thread

    def take(self, origins: Mapping[str, int]) -> None:
        """Continue partitions from the offsets in the database."""
        parts = {split_origin(origin): epoch for origin, epoch in origins.items()}
        name = f"consume {self.group}"
        ids = self._topic_ids.read({topic for topic, _ in parts})
        with self._database.connect(name, impatient=True) as connection:
            stored = self._offsets.make(connection, list(parts))
            replaced = self._offsets.find_replaced(connection, list(parts), ids)
            ended = self._offsets.find_ended(connection, list(parts))
            highest = self._offsets.read_highest(connection, list(parts))
            sources = self._offsets.make_sources(
                connection, [one for one in parts if one[0] in self._placed]
            )
            # The tables' names may be others since somebody had the partitions. A
            # switch that has not seen the offsets made above must be over.
            declared = self._declared.values()
            versions.place(connection, self._database.queries, declared, waits=True)
            effects = self._offsets.read_effects(connection, declared)
        with self._changed:
            for partition, epoch in parts.items():
                topic, at = partition[0], stored.get(partition)
                progress = self._partitions[partition] = Progress(
                    partition,
                    epoch,
                    at,
                    highest.get(partition),
                    effects.get(partition, ALL),
                    topic_id=ids.get(topic),
                    placing=Placing(sources[partition], self._database.queries)
                    if partition in sources
                    else None,
                    replaced=partition in replaced,
                    stopped=partition in ended,
                    ended=partition in ended,
                    most=self._declared[topic].block or self._block,
                    size=self._choose_size(topic),
                    reads_ahead=self._declared[topic].reads_ahead,
                    share=self._shares[topic],
                )
                if progress.has_other_records:
                    self._commits.note_anew(partition)
                # The owner before may have ended between its two commits. And Kafka
                # may have an offset of an earlier database, for which others wait.
                else:
                    self._commits.note(partition, at or 0)
        for partition in parts.keys() - replaced - ended:
            self._member.begin(partition, stored.get(partition))
        if self._done:
            self._done.tell_soon()

    def _choose_size(self, topic: str) -> int:
        """Choose the size of a partition's first block."""
        if (known := self._shares[topic].size) is not None:
            return known
        ends_in_time = self._declared[topic].ends_in_time
        return FIRST_SIZE if ends_in_time else FIRST_WHOLE_SIZE

    def release(self, origins: frozenset[str], timeout: float) -> None:
        """Stop applying these partitions; wait for blocks that are being applied."""
        parts = {split_origin(origin) for origin in origins}
        with self._changed:
            leaving = [p for key, p in self._partitions.items() if key in parts]
            for progress in leaving:
                progress.leaving = True
                progress.drop_all()
            self._changed.wait_for(
                lambda: not any(progress.busy for progress in leaving), timeout
            )
        self._commits.tell(now=True)
        self._failures.tell(origins)
        with self._changed:
            self._commits.forget(parts)
            for partition in parts:
                self._partitions.pop(partition, None)

    # The member's side, in the poll thread

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """Begin partitions again that come back before the ownership has let them go.

        It sees no change, while the client has forgotten where they were. Others may
        have had them meanwhile.
        """
        with self._changed:
            for partition in partitions:
                progress = self._partitions.get(partition)
                if progress is None or progress.leaving:
                    continue
                progress.in_doubt = True
                # What it has asked for its range may be forgotten, too.
                progress.stopped |= progress.ended
                self._begin_again(progress)

    def revoked(self, partitions: frozenset[Partition]) -> None:
        """Do nothing: the ownership releases them, by :meth:`release`."""

    def lost(self, partitions: frozenset[Partition]) -> None:
        """Do nothing, likewise."""

    def begun(self, partition: Partition) -> None:
        """Note that records of this partition now follow the stored offset."""
        with self._changed:
            progress = self._partitions.get(partition)
            if progress is None or progress.leaving:
                return
            # Another thread may have set it back since it was to be begun there.
            if progress.goes_on_from(self._member.get_begun(partition)):
                progress.reading = True
            else:
                self._begin_again(progress)

    def _begin_again(self, progress: Progress) -> None:
        """Let the client go on behind what waits; the caller holds the lock."""
        progress.reading = False
        # Else it is begun as soon as it is settled, or has room.
        if progress.may_be_read:
            self._member.begin(progress.partition, progress.next_fetch)

    def out_of_range(self, partition: Partition, start: int, end: int) -> None:
        """Note that the partition has no record at the offset to go on from."""
        with self._changed:
            progress = self._partitions.get(partition)
            if progress is None or progress.leaving:
                return
            # What waits is applied before, and nothing behind it may be passed over.
            if progress.stored is not None or progress.waiting:
                progress.range = (start, end)
                self._changed.notify()
                return
            progress.oldest = start
        # The group is new: it begins with the oldest record.
        self._member.begin(partition, start)

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Note that Kafka has these offsets now."""
        self._commits.note_committed(offsets)

    def has_room(self) -> bool:
        """Whether more records may wait in memory; pauses those that move slowly."""
        return self._queues.has_room()

    def received(self, messages: list[Message]) -> None:
        """Queue records for the workers."""
        self._queues.add(messages)

    # The workers' threads

    def _work(self, number: int) -> Iterator[None]:
        """Apply blocks; an error of a handler is noted for its partition alone."""
        try:
            yield from self._work_on(number)
        finally:
            if progress := self._next[number]:
                self._next[number] = None
                self._queues.release(progress)

    def _work_on(self, number: int) -> Iterator[None]:
        loop = self._loops[number]
        patience = self._database.timeout
        with self._database.connect(loop.name, answer_within=patience) as connection:
            # Such as the rows of a read model whose table is locked.
            connection.cancels = True
            # A handler that rolls back must not go on outside of any transaction.
            connection.autocommit = False
            # Nobody knows what was committed on the last one, or what a server has
            # that took over.
            self._looks.doubt_all()
            while not self._stopping.is_set():
                if self._looks.look(connection):
                    self._member.ask_positions(self._commits.note_reached)
                self._failures.tell()
                if self._gated is not None:
                    self._gated.look()
                progress = self._next[number] or self._queues.take()
                self._next[number] = None
                if progress is None:
                    loop.pulse.beat()
                    self._commits.tell()
                    continue
                began = time.monotonic()
                try:
                    with loop.pulse.elsewhere():
                        self._apply(connection, progress, number)
                finally:
                    with self._changed:
                        seconds = time.monotonic() - began
                        self.measures.add_seconds(progress.partition[0], seconds)
                        self._queues.release(progress)
                self._commits.tell()
                yield

    def _apply(self, connection: Session[Any], progress: Progress, number: int) -> None:
        self._failures.write_late(connection, progress)
        if not self._recovery.settle(connection, progress):
            return
        try:
            with self._changed:
                block, ahead = self._choose(progress)
        except RecordError as error:
            with self._changed:
                first = [*islice(progress.waiting, 1)]
            if first:
                self._failures.note(connection, progress, first, 0, error)
            return
        if not block or not self._prepare(connection, progress, block):
            return
        began, worked = time.monotonic(), time.thread_time()
        try:
            applied = self._applier.commit(
                connection, progress, block, ahead, partial(self._read_ahead, number)
            )
        except BaseException as error:
            connection.take_back()
            if time.monotonic() - began > self._applier.get_budget(progress):
                progress.shrink(len(block))
            if connection.closed:
                self._failures.note_loss(progress, block, error)
                raise
            connection.rollback()
            self._failures.note_error(connection, progress, block, error)
            return
        seconds, worked = time.monotonic() - began, time.thread_time() - worked
        progress.adapt(
            applied,
            seconds,
            worked,
            self._applier.get_budget(progress),
            0.0 if ahead is None else ahead.seconds,
        )
        self._move(progress, get_offset(block[applied - 1]) + 1, applied)
        self._failures.tell_undone(progress)

    def _choose(self, progress: Progress) -> tuple[list[Message], Ahead | None]:
        """Choose the next block, which may be read already; call under the lock.

        Raises:
            RecordError: the first record does not say for what it waits.
        """
        ahead = progress.take_ahead()
        block = progress.choose() if ahead is None else ahead.block
        if self._gated is not None:
            size = len(block)
            block = self._gated.cut(progress, block)
            if len(block) < size:
                ahead = None
        progress.taken = len(block)
        return block, ahead

    def _move(self, progress: Progress, following: int, count: int) -> None:
        """Note that so many records are committed, and read on if few wait."""
        with self._changed:
            if not progress.replaced:
                self._commits.note(progress.partition, following)
            # Once it is to leave, nothing waits any more.
            if not progress.leaving:
                progress.move(following, count)
            self._queues.refill(progress)

    def _prepare(
        self, connection: Session[Any], progress: Progress, block: list[Message]
    ) -> bool:
        """Fetch what is needed to read a block, so that no transaction waits for it."""
        try:
            self._declared[progress.partition[0]].prepare(block)
        except RecordError as error:
            self._failures.note(connection, progress, block, None, error)
        except JobsError as error:
            # A server does not answer, such as the registry: not the record's fault.
            progress.wait_longer()
            telemetry.emit("loop.failed", loop=f"consume {self.group}", error=error)
            self._failures.note_stop(
                connection, progress, get_offset(block[0]), describe(error)
            )
        else:
            return True
        return False

    def _read_ahead(self, number: int) -> None:
        """Read the next block of any partition, while the database is at work."""
        progress = self._queues.take_ahead()
        if progress is None:
            return
        self._next[number] = progress
        model = self._declared[progress.partition[0]].model
        assert model is not None
        try:
            with self._changed:
                block, _ = self._choose(progress)
        except RecordError:
            return  # it is raised again at its turn
        if not block:
            return
        began = time.monotonic()
        try:
            changes: Changes | BlockError = model.read(block, progress.highest)
        except BlockError as error:
            changes = error
        with self._changed:
            progress.ahead = Ahead(block, changes, time.monotonic() - began)

    def _find_placed(self) -> dict[Partition, Progress]:
        """Find the owned partitions whose jobs get the places of records."""
        with self._changed:
            return {
                partition: progress
                for partition, progress in self._partitions.items()
                if self._declared[partition[0]].done
            }
