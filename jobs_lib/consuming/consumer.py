"""The consumer: applies a block of records and its offset in one transaction.

The poll thread (see :mod:`jobs_lib.kafka.member`) fills a queue for each partition and
pauses partitions that are far ahead. Worker threads take a partition each, apply a
block, and move the offset in the same transaction under the fence. Offsets in the
database win over Kafka's: they are committed to Kafka later, so Kafka's may lag but
never lead.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.errors import FencedError, JobsError, RecordError
from jobs_lib.loop import Loop
from jobs_lib.masking import describe
from jobs_lib.postgres.database import BEGIN, fenced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from uuid import UUID

    from confluent_kafka import Message

    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.kafka.member import GroupMember, Partition
    from jobs_lib.postgres.database import Database
    from jobs_lib.telemetry.liveness import Pulse

_COMMIT_PAUSE = 1.0
_READ_AHEAD = 4
"""Blocks that may wait in memory before the partition is paused."""
_LAST_SECONDS = 1.0
"""Seconds for each thread to end, after its partitions were released."""


@dataclass(slots=True, eq=False)
class Progress:
    """One owned partition."""

    partition: Partition
    epoch: int
    stored: int | None
    """The offset in the database; None if nothing was applied yet."""
    waiting: deque[Message] = field(default_factory=deque)
    reading: bool = False
    """Set once the client reads from the stored offset: earlier records are useless."""
    unsure: bool = False
    """Set when a commit's answer was lost: the offset must be read again first."""
    paused: bool = False
    busy: bool = False
    leaving: bool = False
    failures: int = 0
    retry_at: float = 0.0


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
        threads: int = 2,
    ) -> None:
        self.group = member.group
        self._database = database
        self._member = member
        self._declared = {one.topic: one for one in declared}
        self._owner = owner
        self._block = block
        self._partitions: dict[Partition, Progress] = {}
        self._changed = threading.Condition()
        self._uncommitted: dict[Partition, int] = {}
        self._committed_at = 0.0
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
        return [loop.pulse for loop in self._loops]

    def start(self) -> None:
        """Start the worker threads; they read nothing until partitions are taken."""
        for loop in self._loops:
            loop.start()

    def stop(self) -> None:
        """Stop the threads. Call after the partitions have been released."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        for loop in self._loops:
            # A handler that hangs is fenced: its partition has been released.
            loop.stop(_LAST_SECONDS)

    # The Holder's side, in the ownership's thread

    def take(self, origins: Mapping[str, int]) -> None:
        """Continue partitions from the offsets in the database."""
        parts = {_parse(origin): epoch for origin, epoch in origins.items()}
        name = f"consume {self.group}"
        with self._database.connect(name, impatient=True) as connection:
            stored = self._read_offsets(connection, list(parts))
        with self._changed:
            for partition, epoch in parts.items():
                self._partitions[partition] = Progress(
                    partition, epoch, stored.get(partition)
                )
        for partition in parts:
            self._member.begin(partition, stored.get(partition))

    def release(self, origins: frozenset[str], timeout: float) -> None:
        """Stop applying these partitions; wait for blocks that are being applied."""
        parts = {_parse(origin) for origin in origins}
        with self._changed:
            leaving = [p for key, p in self._partitions.items() if key in parts]
            for progress in leaving:
                progress.leaving = True
                progress.waiting.clear()
            self._changed.wait_for(
                lambda: not any(progress.busy for progress in leaving), timeout
            )
            for partition in parts:
                self._partitions.pop(partition, None)
        self._commit_to_kafka(now=True)

    # The member's side, in the poll thread

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """Do nothing: the ownership has a listener of its own."""

    def revoked(self, partitions: frozenset[Partition]) -> None:
        """Do nothing, likewise."""

    def lost(self, partitions: frozenset[Partition]) -> None:
        """Do nothing, likewise."""

    def begun(self, partition: Partition) -> None:
        """Note that records of this partition now follow the stored offset."""
        with self._changed:
            if progress := self._partitions.get(partition):
                progress.reading = True

    def received(self, messages: list[Message]) -> None:
        """Queue records for the workers; pause partitions that are far ahead."""
        with self._changed:
            for message in messages:
                partition = (message.topic() or "", message.partition() or 0)
                progress = self._partitions.get(partition)
                if progress is None or progress.leaving or not progress.reading:
                    continue
                progress.waiting.append(message)
                if (
                    not progress.paused
                    and len(progress.waiting) >= _READ_AHEAD * self._block
                ):
                    progress.paused = True
                    self._member.pause(partition)
            self._changed.notify_all()

    # The workers' threads

    def _work(self, number: int) -> Iterator[None]:
        """Apply blocks; an error of a handler is noted for its partition alone."""
        loop = self._loops[number]
        with self._database.connect(loop.name) as connection:
            while not self._stopping.is_set():
                progress = self._take()
                if progress is None:
                    loop.pulse.beat()
                    self._commit_to_kafka()
                    continue
                try:
                    with loop.pulse.elsewhere():
                        self._apply(connection, progress)
                finally:
                    with self._changed:
                        progress.busy = False
                        self._changed.notify_all()
                self._commit_to_kafka()
                yield

    def _take(self) -> Progress | None:
        """Take the next partition with records, marked busy; None after a while."""
        with self._changed:
            now = time.monotonic()
            ready = [
                progress
                for progress in self._partitions.values()
                if progress.waiting and not progress.busy and progress.retry_at <= now
            ]
            if not ready:
                self._changed.wait(0.1)
                return None
            # The partition that waited longest goes first, then to the queue's end.
            progress = ready[0]
            progress.busy = True
            self._partitions[progress.partition] = self._partitions.pop(
                progress.partition
            )
            return progress

    def _apply(self, connection: psycopg.Connection[Any], progress: Progress) -> None:
        if progress.unsure:
            progress.stored = self._read_offsets(connection, [progress.partition]).get(
                progress.partition
            )
            progress.unsure = False
        # After a failure apply single records, so that good ones before it go in.
        size = 1 if progress.failures else self._block
        with self._changed:
            block = [
                progress.waiting[i] for i in range(min(size, len(progress.waiting)))
            ]
        stored = progress.stored
        fresh = [m for m in block if stored is None or (m.offset() or 0) >= stored]
        if fresh and not self._prepare(progress, fresh):
            return
        try:
            if fresh:
                self._commit_block(connection, progress, fresh)
        except FencedError as error:
            connection.rollback()
            progress.leaving = True
            telemetry.emit("loop.failed", loop=f"consume {self.group}", error=error)
        except psycopg.OperationalError:
            # Nobody knows whether the commit went through.
            progress.unsure = True
            raise
        except BaseException as error:
            connection.rollback()
            self._note_failure(progress, fresh, error)
            return
        with self._changed:
            if progress.leaving:
                progress.waiting.clear()
                return
            for _ in block:
                progress.waiting.popleft()
            progress.failures = 0
            if progress.paused and len(progress.waiting) < self._block:
                progress.paused = False
                self._member.resume(progress.partition)

    def _prepare(self, progress: Progress, block: list[Message]) -> bool:
        """Fetch what is needed to read a block, so that no transaction waits for it."""
        try:
            self._declared[progress.partition[0]].prepare(block)
        except RecordError as error:
            self._note_failure(progress, block, error)
        except JobsError as error:
            # A server does not answer, such as the registry: not the record's fault.
            progress.failures += 1
            progress.retry_at = time.monotonic() + RECONNECT.delay(progress.failures)
            telemetry.emit("loop.failed", loop=f"consume {self.group}", error=error)
        else:
            return True
        return False

    def _commit_block(
        self,
        connection: psycopg.Connection[Any],
        progress: Progress,
        block: list[Message],
    ) -> None:
        topic, number = progress.partition
        following = (block[-1].offset() or 0) + 1
        origin = f"{topic}/{number}"
        connection.execute(BEGIN)
        self._declared[topic].apply(connection, block)
        if telemetry.listened("records.applied"):
            telemetry.emit(
                "records.applied", group=self.group, origin=origin, count=len(block)
            )
        # One round trip: if the offset is refused, the server rolls back.
        with fenced(), connection.pipeline():
            connection.execute(
                self._database.queries["advance_offset"],
                {
                    "group": self.group,
                    "topic": topic,
                    "partition": number,
                    "owner": self._owner,
                    "epoch": progress.epoch,
                    "expected": progress.stored,
                    "next_offset": following,
                },
                prepare=True,
            )
            connection.execute("commit")
        progress.stored = following
        if telemetry.listened("records.committed"):
            telemetry.emit(
                "records.committed",
                group=self.group,
                origin=origin,
                next_offset=following,
            )
        with self._changed:
            self._uncommitted[progress.partition] = following

    def _note_failure(
        self, progress: Progress, block: list[Message], error: BaseException
    ) -> None:
        """Stop the partition at this record until it can be applied; others go on."""
        progress.failures += 1
        alone = len(block) == 1
        if alone:
            topic, number = progress.partition
            progress.retry_at = time.monotonic() + RECONNECT.delay(progress.failures)
            telemetry.emit(
                "record.failed",
                group=self.group,
                origin=f"{topic}/{number}",
                offset=block[0].offset(),
                error=describe(error),
            )

    def _commit_to_kafka(self, now: bool = False) -> None:
        with self._changed:
            if not self._uncommitted or (
                not now and time.monotonic() - self._committed_at < _COMMIT_PAUSE
            ):
                return
            offsets, self._uncommitted = self._uncommitted, {}
            self._committed_at = time.monotonic()
        self._member.commit(offsets)

    def _read_offsets(
        self, connection: psycopg.Connection[Any], partitions: list[Partition]
    ) -> dict[Partition, int]:
        parameters = {
            "group": self.group,
            "topics": [topic for topic, _ in partitions],
            "partitions": [number for _, number in partitions],
        }
        connection.execute(self._database.queries["make_offsets"], parameters)
        rows = connection.execute(
            self._database.queries["read_offsets"], parameters
        ).fetchall()
        return {(topic, number): at for topic, number, at in rows if at is not None}


def _parse(origin: str) -> Partition:
    topic, _, number = origin.rpartition("/")
    return topic, int(number)
