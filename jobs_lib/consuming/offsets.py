"""The offsets of one group in the database, which win over Kafka's."""

from __future__ import annotations

import math
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg

from jobs_lib.consuming.progress import Effects
from jobs_lib.postgres.database import fenced
from jobs_lib.postgres.session import commit_soon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from jobs_lib.consuming.progress import Progress
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.kafka.member import Partition
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.postgres.session import Session

MOVED = "JB004"
"""The SQLSTATE where an offset is no longer where this process left it."""
ENDED = "JB003"
"""The SQLSTATE where a handler has ended the transaction of its block."""


class Offsets:
    """Reads the offsets of a group, and moves them under the fence."""

    def __init__(
        self, queries: Queries, group: str, owner: UUID, *, again: bool = False
    ) -> None:
        """Prepare.

        Args:
            queries: the statements.
            group: the consumer group.
            owner: the process that owns the partitions.
            again: whether the group re-synchronises a read model: it owns nothing any
                more once the re-synchronisation has ended.
        """
        self._queries = queries
        self._group = group
        self._owner = owner
        self._move_by = "advance_resync" if again else "advance_offset"

    def read(
        self, connection: psycopg.Connection[Any], partitions: Sequence[Partition]
    ) -> dict[Partition, int]:
        """Read the offsets of these partitions; those without one are left out."""
        with connection.transaction():
            return self._read(connection, partitions)

    def make(
        self, connection: psycopg.Connection[Any], partitions: Sequence[Partition]
    ) -> dict[Partition, int]:
        """The same, and add the rows that are missing."""
        with connection.transaction():
            connection.execute(self._queries["make_offsets"], self._name(partitions))
            return self._read(connection, partitions)

    def find_replaced(
        self,
        connection: psycopg.Connection[Any],
        partitions: Sequence[Partition],
        topic_ids: Mapping[str, UUID],
    ) -> set[Partition]:
        """Find partitions whose topic was deleted and made anew since their offset."""
        known = [one for one in partitions if one[0] in topic_ids]
        ids = [topic_ids[topic] for topic, _ in known]
        with connection.transaction():
            rows = connection.execute(
                self._queries["find_replaced"], {**self._name(known), "topic_ids": ids}
            ).fetchall()
        return {(topic, number) for topic, number in rows}

    def find_ended(
        self, connection: psycopg.Connection[Any], partitions: Sequence[Partition]
    ) -> set[Partition]:
        """Find partitions that stand still because they ended before their offset."""
        with connection.transaction():
            rows = connection.execute(
                self._queries["find_ended"],
                {**self._name(partitions), "ended": ENDED_EARLY},
            ).fetchall()
        return {(topic, number) for topic, number in rows}

    def read_highest(
        self, connection: psycopg.Connection[Any], partitions: Sequence[Partition]
    ) -> dict[Partition, int]:
        """Read the highest offset that each of these ever had, if it had any.

        Call :meth:`find_replaced` before: it ends what a topic had that is gone.
        """
        with connection.transaction():
            rows = connection.execute(
                self._queries["read_highest"], self._name(partitions)
            ).fetchall()
        return {(topic, number): at for topic, number, at in rows if at is not None}

    def read_passed(
        self, connection: Session[Any], progress: Progress, group: str
    ) -> int:
        """Read before which offset another group has read a partition.

        It only grows, as long as the topic is the same: what comes again has been
        passed before.
        """
        named = {**self._place(progress), "group": group}
        with connection.transaction():
            row = connection.execute(
                self._queries["read_passed"],
                {**named, "topic_id": progress.topic_id},
            ).fetchone()
        return 0 if row is None else row[0]

    def read_effects(
        self, connection: psycopg.Connection[Any], declared: Iterable[Subscription]
    ) -> dict[Partition, Effects]:
        """Read which records of read models have effects elsewhere.

        Partitions of which all records have some are left out.
        """
        topics = {
            one.topic: one.is_current
            for one in declared
            if one.model is not None and one.model.on_change is not None
        }
        if not topics:
            return {}
        with connection.transaction():
            rows = connection.execute(
                self._queries["read_effects"],
                {"group": self._group, "topics": [*topics]},
            ).fetchall()
        return {
            (topic, number): Effects(
                begin or 0, math.inf if topics[topic] else until or 0
            )
            for topic, number, begin, until in rows
        }

    def make_sources(
        self, connection: psycopg.Connection[Any], partitions: Sequence[Partition]
    ) -> dict[Partition, int]:
        """Read the numbers by which jobs name these partitions; new ones get one."""
        if not partitions:
            return {}
        named = self._name(partitions)
        # Each is a statement of its own: the second one sees what others have added.
        connection.execute(self._queries["make_sources"], named)
        rows = connection.execute(self._queries["read_sources"], named).fetchall()
        return {(topic, number): source for topic, number, source in rows}

    def begin(self, connection: Session[Any], place: str | None = None) -> str:
        """Begin a transaction; returns the mark by which the server knows it again.

        Args:
            connection: without a transaction.
            place: for jobs that are enqueued in SQL; None for none.
        """
        with connection.pipeline():
            return self._begin(connection, place)

    def advance(
        self,
        connection: Session[Any],
        progress: Progress,
        following: int,
        appended_at: datetime | None,
        mark: str,
    ) -> None:
        """Move a partition's offset, and commit.

        It notes whether jobs got the place of the transaction.

        Args:
            connection: with the transaction that :meth:`begin` has begun.
            progress: the partition.
            following: the offset of the next record.
            appended_at: the timestamp of the last record.
            mark: of the transaction.

        Raises:
            FencedError: another process has the partition.
            psycopg.Error: with the SQLSTATE `MOVED` or `ENDED`.
        """
        # One round trip: if the offset is refused, the server rolls back.
        with fenced(), connection.pipeline():
            moved = self._move(connection, progress, following, appended_at, mark)
            connection.execute("commit")
        if progress.placing and not progress.placing.in_sql:
            progress.placing.in_sql = bool(moved.fetchall()[0][1])

    @contextmanager
    def advancing(
        self,
        connection: Session[Any],
        progress: Progress,
        following: int,
        appended_at: datetime | None,
        meanwhile: Callable[[], None],
    ) -> Iterator[None]:
        """Do what the block does, move the offset, and commit: all in one round trip.

        No application's code may run in it, which could end the transaction; nor may
        `connection.transaction` be called, which commits what was sent before. While
        the server works, ``meanwhile`` is called, which must not raise.

        Args:
            connection: without a transaction.
            progress: the partition.
            following: the offset of the next record.
            appended_at: the timestamp of the last record.
            meanwhile: called once all statements are sent.

        Raises:
            FencedError: another process has the partition.
            psycopg.Error: a statement failed, or as for :meth:`advance`.
            Exception: the block cannot be sent; nothing of it is committed.
        """
        # The statements of a pipeline are one transaction, which ends with it: so
        # neither BEGIN nor COMMIT is sent.
        connection.autocommit = True
        try:
            with fenced(), connection.pipeline() as pipeline:
                try:
                    yield
                    self._move(connection, progress, following, appended_at, None)
                    # However long the rest takes, nobody waits for the block's locks.
                    commit_soon(connection, pipeline)
                    meanwhile()
                except BaseException:
                    # The end of the pipeline would commit what was sent so far.
                    with suppress(psycopg.Error):
                        connection.execute(self._queries["refuse_block"]).fetchone()
                    raise
        finally:
            if not connection.closed:
                connection.autocommit = False

    def _begin(self, connection: Session[Any], place: str | None) -> str:
        mark = uuid4().hex
        named = {"block": mark, "place": place}
        query = "begin_block" if place is None else "begin_placed_block"
        connection.execute(self._queries[query], named, prepare=True)
        return mark

    def _move(
        self,
        connection: Session[Any],
        progress: Progress,
        following: int,
        appended_at: datetime | None,
        mark: str | None,
    ) -> psycopg.Cursor[Any]:
        topic, number = progress.partition
        return connection.execute(
            self._queries[self._move_by],
            {
                "group": self._group,
                "topic": topic,
                "partition": number,
                "owner": self._owner,
                "epoch": progress.epoch,
                "expected": progress.stored,
                "next_offset": following,
                "appended_at": appended_at,
                "block": mark,
            },
            prepare=True,
        )

    def skip(
        self,
        connection: Session[Any],
        progress: Progress,
        offset: int,
        error: str,
        appended_at: datetime | None,
    ) -> None:
        """Write a record into the table `skipped`, move behind it, and commit.

        Args:
            connection: without a transaction.
            progress: the partition.
            offset: of the record.
            error: says why it is skipped, without values.
            appended_at: the timestamp of the record.

        Raises:
            FencedError: another process has the partition.
            psycopg.Error: with the SQLSTATE `MOVED`, if somebody moved the offset.
        """
        mark = self.begin(connection)
        connection.execute(
            self._queries["skip_record"],
            {**self._place(progress), "offset": offset, "error": error},
        )
        self.advance(connection, progress, offset + 1, appended_at, mark)

    def read_skipped(
        self, connection: Session[Any], progress: Progress, first: int, following: int
    ) -> set[int]:
        """Read the offsets of skipped records that come again, in a transaction."""
        named = {**self._place(progress), "first": first, "following": following}
        rows = connection.execute(self._queries["read_skipped"], named).fetchall()
        return {offset for (offset,) in rows}

    def forget_skipped(
        self, connection: Session[Any], progress: Progress, first: int, following: int
    ) -> None:
        """Forget that records were skipped which the open transaction applies."""
        named = {**self._place(progress), "first": first, "following": following}
        connection.execute(self._queries["forget_skipped"], named)

    def owns(self, connection: Session[Any], progress: Progress) -> bool:
        """Whether a partition is still this process's; True if nobody can tell."""
        owned = {"owner": self._owner, "epoch": progress.epoch}
        try:
            with connection.transaction():
                row = connection.execute(
                    self._queries["owns_partition"], {**self._place(progress), **owned}
                ).fetchone()
        except psycopg.Error:
            return True
        return row is None or bool(row[0])

    def note_failure(
        self, connection: Session[Any], progress: Progress, offset: int, error: str
    ) -> None:
        """Write down the record at which a partition stands still, if it is ours."""
        values = {"offset": offset, "error": error}
        self._note(connection, "note_failure", progress, values)

    def clear_failure(self, connection: Session[Any], progress: Progress) -> None:
        """Write down that a partition does not stand still, if it is ours."""
        self._note(connection, "clear_failure", progress, {})

    def replace_topic(
        self,
        connection: Session[Any],
        partition: Partition,
        topic_id: UUID,
        before: int | None,
    ) -> None:
        """Note in the open transaction that there is another topic, without an offset.

        Args:
            connection: with the transaction.
            partition: of the topic.
            topic_id: of the topic that there is now.
            before: the offset in the topic that is gone.
        """
        topic, number = partition
        connection.execute(
            self._queries["replace_topic"],
            {
                "group": self._group,
                "topic": topic,
                "partition": number,
                "topic_id": topic_id,
                "before": before,
            },
        )

    def _note(
        self,
        connection: Session[Any],
        query: str,
        progress: Progress,
        values: Mapping[str, Any],
    ) -> None:
        owned = {
            "owner": self._owner,
            "epoch": progress.epoch,
            "expected": progress.stored,
        }
        with connection.transaction():
            connection.execute(
                self._queries[query], {**self._place(progress), **owned, **values}
            )

    def _place(self, progress: Progress) -> dict[str, Any]:
        topic, number = progress.partition
        return {"group": self._group, "topic": topic, "partition": number}

    def _read(
        self, connection: psycopg.Connection[Any], partitions: Sequence[Partition]
    ) -> dict[Partition, int]:
        rows = connection.execute(
            self._queries["read_offsets"], self._name(partitions)
        ).fetchall()
        return {(topic, number): at for topic, number, at in rows if at is not None}

    def _name(self, partitions: Sequence[Partition]) -> dict[str, Any]:
        return {
            "group": self._group,
            "topics": [topic for topic, _ in partitions],
            "partitions": [number for _, number in partitions],
        }


ENDED_EARLY = "the partition ended before offset "
"""The reason begins with this text if the partition ended before its offset. The next
process recognises the case by it."""


def explain_gap(stored: int, start: int, end: int) -> str:
    """Say why no record has a stored offset, and what to do.

    Args:
        stored: the offset of the next record.
        start: the offset of the partition's oldest record.
        end: the offset that its next record will have.
    """
    if stored < start:
        return (
            f"{start - stored} records before offset {start} are gone, by retention or "
            f"a cut log. To go on without them, set next_offset = {start} in the table "
            "offsets, or declare on_gap='skip'"
        )
    return (
        f"{ENDED_EARLY}{stored}, and ends before offset {end} now: its topic was made "
        "anew or restored, and nobody knows where its records go on. Set next_offset "
        "in the table offsets to where it should go on, such as "
        f"{start} for all that there is, or failed_offset = null to go on at {stored}"
    )


REPLACED = (
    "the topic was deleted and made anew: the offset belongs to the one before. Set "
    "topic_id = null in the table offsets, and next_offset to where to go on, such as "
    "0 for all that there is"
)
"""Says why a partition stands still, and what to do."""
