"""Where a partition goes on if its stored offset may not be the place to go on from.

Somebody may have moved the offset, the topic may have lost the records at that place,
or the topic may be another one of the same name.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.consuming.offsets import ENDED_EARLY, REPLACED, Offsets, explain_gap
from jobs_lib.consuming.progress import ALL
from jobs_lib.errors import FencedError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Mapping
    from uuid import UUID

    from jobs_lib.consuming.commits import Commits
    from jobs_lib.consuming.failures import Failures
    from jobs_lib.consuming.progress import Progress
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.kafka.member import GroupMember
    from jobs_lib.postgres.session import Session


class Recovery:
    """Finds out where partitions go on; used by the threads that apply blocks."""

    def __init__(
        self,
        member: GroupMember,
        declared: Mapping[str, Subscription],
        offsets: Offsets,
        failures: Failures,
        read_ids: Callable[[Iterable[str]], Mapping[str, UUID]],
        lock: threading.Condition,
        commits: Commits,
        read_policy: Callable[[str], str | None] = lambda topic: None,
    ) -> None:
        """Prepare.

        Args:
            member: reads the partitions.
            declared: what to do with the records of each topic.
            offsets: of the group, in the database.
            failures: writes down why partitions stand still.
            read_ids: asks Kafka for the ids of topics.
            lock: guards the partitions.
            commits: tell Kafka where partitions go on.
            read_policy: asks Kafka how a topic is cleaned up.
        """
        self._member = member
        self._declared = declared
        self._offsets = offsets
        self._failures = failures
        self._read_ids = read_ids
        self._lock = lock
        self._commits = commits
        self._read_policy = read_policy

    def settle(self, connection: Session[Any], progress: Progress) -> bool:
        """Settle what is open; returns whether waiting records may be applied."""
        if progress.replaced:
            self._settle_topic(connection, progress)
            return False
        if progress.in_doubt:
            self._settle_doubt(connection, progress)
            if progress.retry_at > time.monotonic():
                return False
        # What is in memory goes in first: the log may not have it any more.
        if progress.range is not None and not progress.waiting:
            self._settle_range(connection, progress, *progress.range)
            return False
        if progress.stopped:
            progress.stopped = False
            if progress.ended:
                self._member.ask_range(progress.partition)
                return False
            # A broker that was restored may have the records by now.
            self._member.begin(progress.partition, progress.stored)
        return True

    def _settle_doubt(self, connection: Session[Any], progress: Progress) -> None:
        """Go on from the offset in the database, wherever it is."""
        found = self._offsets.make(connection, [progress.partition])
        self._note_highest(connection, progress)
        stored = found.get(progress.partition)
        with self._lock:
            progress.in_doubt = False
            before, is_ours = progress.stored, progress.has_committed(stored)
            progress.unsure_until = None
            goes_on = progress.continues_at(stored)
        if goes_on:
            self._failures.forget(progress)
            if not is_ours:
                self._tell_moved(progress, before)
            return
        with self._lock:
            progress.start_again(stored)
            # Kafka's offset would lead until the next record is handled.
            self._commits.note(progress.partition, stored or 0)
        self._failures.clear(connection, progress)
        self._tell_moved(progress, before)
        self._member.begin(progress.partition, stored)

    def _settle_range(
        self, connection: Session[Any], progress: Progress, start: int, end: int
    ) -> None:
        """Go on where there are records, or stop where that would pass some over."""
        before = progress.stored
        if before is None:
            # What waited was let go before anything was applied.
            with self._lock:
                progress.start_again(None)
                progress.oldest = start
            self._member.begin(progress.partition, start)
            return
        ids = self._read_ids([progress.partition[0]])
        if self._offsets.find_replaced(connection, [progress.partition], ids):
            with self._lock:
                progress.replaced = True
                self._commits.note_anew(progress.partition)
            return
        if progress.ended and self._has_moved(connection, progress):
            with self._lock:
                progress.in_doubt = True
            return
        if start <= before <= end and not self._has_ended(connection, progress):
            with self._lock:
                progress.start_again(before)
                # Kafka may have been told that nothing counts as handled.
                self._commits.note(progress.partition, before)
            self._failures.clear(connection, progress)
            self._member.begin(progress.partition, before)
            return
        policy = self._find_policy(progress, before, start)
        declared = self._declared[progress.partition[0]]
        if not declared.may_pass(before, start, policy):
            with self._lock:
                progress.ended |= before > end
                if progress.ended:
                    # Its next records take the places of those that were handled.
                    self._commits.note_anew(progress.partition)
                progress.stop()
            reason = explain_gap(before, start, end)
            telemetry.emit(
                "offset.lost",
                group=self._member.group,
                origin=progress.origin,
                next_offset=before,
                start=start,
                end=end,
                error=reason,
            )
            self._failures.note_stop(connection, progress, before, reason)
            return
        try:
            mark = self._offsets.begin(connection)
            self._offsets.advance(connection, progress, start, None, mark)
        except FencedError:
            connection.rollback()
            progress.leaving = True
            return
        with self._lock:
            progress.start_again(start)
            self._commits.note(progress.partition, start)
        if before < start and policy != "compact":
            telemetry.emit(
                "records.gone",
                group=self._member.group,
                origin=progress.origin,
                next_offset=before,
                start=start,
                count=start - before,
            )
        self._tell_moved(progress, before)
        self._member.begin(progress.partition, start)

    def _find_policy(self, progress: Progress, before: int, start: int) -> str | None:
        """Find how the topic of a read model is cleaned up, where its start moved."""
        topic = progress.partition[0]
        if before >= start or not self._declared[topic].is_read_model:
            return None
        return self._read_policy(topic)

    def _has_moved(self, connection: Session[Any], progress: Progress) -> bool:
        """Whether somebody has set the offset, which no look has noticed yet."""
        found = self._offsets.read(connection, [progress.partition])
        return found.get(progress.partition) != progress.stored

    def _has_ended(self, connection: Session[Any], progress: Progress) -> bool:
        """Whether a partition that is long enough has ended before its offset once.

        Its new records are others than those that lay there. Who has taken the note
        away knows better.
        """
        if not progress.ended:
            return False
        is_noted = bool(self._offsets.find_ended(connection, [progress.partition]))
        was_noted = self._failures.has_noted(progress, ENDED_EARLY)
        return is_noted or not was_noted

    def _settle_topic(self, connection: Session[Any], progress: Progress) -> None:
        """Go on in a topic that was made anew, or stop where that needs a decision."""
        partition = progress.partition
        ids = self._read_ids([partition[0]])
        if partition[0] not in ids:
            # That is no answer: a broker may not know the topic yet, or for a moment.
            progress.wait_longer()
            return
        progress.topic_id = ids[partition[0]]
        before = self._offsets.read(connection, [partition]).get(partition)
        if not self._offsets.find_replaced(connection, [partition], ids):
            # It is not, or an operator has said where to go on. Or this process has
            # noted the new topic, and the answer to that was lost.
            self._note_highest(connection, progress)
            self._note_effects(connection, progress)
            has_ended = bool(self._offsets.find_ended(connection, [partition]))
            with self._lock:
                progress.start_again(before)
                progress.stopped = progress.ended = has_ended
                if has_ended:
                    self._commits.note_anew(partition)
                    return
                self._commits.note(partition, before or 0)
            self._failures.clear(connection, progress)
            self._member.begin(partition, before)
            return
        progress.stored = before
        if not self._declared[partition[0]].is_read_model:
            with self._lock:
                progress.stop()
            telemetry.emit(
                "topic.replaced",
                group=self._member.group,
                origin=progress.origin,
                next_offset=before,
                error=REPLACED,
            )
            self._failures.note_stop(connection, progress, before or 0, REPLACED)
            return
        progress.stored = progress.highest = None
        mark = self._offsets.begin(connection)
        try:
            self._offsets.replace_topic(
                connection, partition, ids[partition[0]], before
            )
            self._offsets.advance(connection, progress, 0, None, mark)
        except FencedError:
            connection.rollback()
            progress.leaving = True
            return
        self._note_effects(connection, progress)
        with self._lock:
            progress.start_again(0)
            self._commits.note(partition, 0)
        self._tell_moved(progress, before)
        self._member.begin(partition, 0)

    def _note_highest(self, connection: Session[Any], progress: Progress) -> None:
        """Note below which offset records come again; the topic's id is known."""
        found = self._offsets.read_highest(connection, [progress.partition])
        progress.highest = found.get(progress.partition)

    def _note_effects(self, connection: Session[Any], progress: Progress) -> None:
        """Note which records have effects elsewhere; a new topic has marks of its own.

        Call it as long as ``replaced`` is set, so that a lost connection repeats it.
        """
        declared = self._declared[progress.partition[0]]
        found = self._offsets.read_effects(connection, [declared])
        progress.effects = found.get(progress.partition, ALL)

    def _tell_moved(self, progress: Progress, before: int | None) -> None:
        telemetry.emit(
            "offset.moved",
            group=self._member.group,
            origin=progress.origin,
            before=before,
            next_offset=progress.stored,
        )
