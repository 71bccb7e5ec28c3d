"""Apply a block of records and move its partition's offset, in one transaction."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.consuming.progress import get_offset
from jobs_lib.consuming.subscription import BlockError
from jobs_lib.kafka.timestamps import read_timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from confluent_kafka import Message

    from jobs_lib.consuming.changes import Changes
    from jobs_lib.consuming.offsets import Offsets
    from jobs_lib.consuming.progress import Ahead, Progress
    from jobs_lib.consuming.read_model import ReadModel
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.postgres.session import Session


class Applier:
    """Applies blocks of one group; used by the threads of a consumer."""

    def __init__(
        self,
        group: str,
        declared: Mapping[str, Subscription],
        offsets: Offsets,
        block_seconds: float,
    ) -> None:
        """Prepare.

        Args:
            group: the consumer group.
            declared: what to do with the records of each topic.
            offsets: of the group, in the database.
            block_seconds: a block ends after the record during which they are over.
        """
        self._group = group
        self._declared = declared
        self._offsets = offsets
        self._block_seconds = block_seconds

    def commit(
        self,
        connection: Session[Any],
        progress: Progress,
        block: list[Message],
        ahead: Ahead | None,
        meanwhile: Callable[[], None],
    ) -> int:
        """Apply a block and move the offset; returns the number of records applied.

        Args:
            connection: without a transaction.
            progress: the partition.
            block: the next records of it.
            ahead: the block, if it has been read already.
            meanwhile: called while the database is at work, if there is time for it.

        Raises:
            BlockError: a record cannot be applied.
            FencedError: another process has the partition.
            psycopg.Error: a statement failed.
        """
        declared = self._declared[progress.partition[0]]
        if declared.model is None:
            applied = self._commit_handled(connection, progress, block, declared)
        else:
            if ahead is None:
                changes = declared.model.read(block, progress.highest)
            elif isinstance(ahead.changes, BlockError):
                raise ahead.changes
            else:
                changes = ahead.changes
            if declared.leaves_to is not None:
                changes = changes.leave(
                    self._offsets.read_passed(connection, progress, declared.leaves_to)
                )
            self._commit_rows(
                connection, progress, block, declared.model, changes, meanwhile
            )
            applied = len(block)
        following = get_offset(block[applied - 1]) + 1
        if telemetry.listened("records.committed"):
            telemetry.emit(
                "records.committed",
                group=self._group,
                origin=progress.origin,
                next_offset=following,
            )
        return applied

    def _commit_handled(
        self,
        connection: Session[Any],
        progress: Progress,
        block: list[Message],
        declared: Subscription,
    ) -> int:
        """Call the handler for each record, until it is time to commit."""
        until = time.monotonic() + self.get_seconds(progress)
        placing = progress.placing
        place = None if placing is None else placing.name(block[0])
        mark = self._offsets.begin(connection, place)
        first, end = get_offset(block[0]), get_offset(block[-1]) + 1
        skipped: set[int] = set()
        if progress.comes_again(first):
            skipped = self._offsets.read_skipped(connection, progress, first, end)
        connection.lend()
        applied = declared.apply(
            connection,
            block,
            lambda: not progress.leaving and time.monotonic() < until,
            progress.highest,
            placing,
            skipped,
        )
        connection.take_back()
        self._tell_applied(progress, applied)
        last = block[applied - 1]
        following = get_offset(last) + 1
        if skipped:
            self._offsets.forget_skipped(connection, progress, first, following)
        self._offsets.advance(
            connection, progress, following, read_timestamp(last), mark
        )
        return applied

    def _commit_rows(
        self,
        connection: Session[Any],
        progress: Progress,
        block: list[Message],
        model: ReadModel,
        changes: Changes,
        meanwhile: Callable[[], None],
    ) -> None:
        """Write the rows of a read model, in one round trip if no handler is called."""
        model.learn_types(connection, changes)
        self._tell_applied(progress, len(block))
        last, following = read_timestamp(block[-1]), get_offset(block[-1]) + 1
        try:
            missing = model.find_missing(connection, changes) if model.gapless else None
            first = get_offset(block[0])
            if model.on_change is None or not progress.effects.reach(first, following):
                with self._offsets.advancing(
                    connection, progress, following, last, meanwhile
                ):
                    model.write(connection, changes, progress.topic_id)
                    if progress.comes_again(first):
                        self._offsets.forget_skipped(
                            connection, progress, first, following
                        )
            else:
                placing = progress.placing
                place = None if placing is None else placing.name(block[0])
                mark = self._offsets.begin(connection, place)
                model.write_and_tell(
                    connection,
                    changes,
                    progress.topic_id,
                    block,
                    self._group,
                    progress.effects,
                    placing,
                )
                if progress.comes_again(first):
                    self._offsets.forget_skipped(connection, progress, first, following)
                self._offsets.advance(connection, progress, following, last, mark)
        except BlockError:
            raise
        except Exception as error:
            raise model.explain(error) from None
        if missing is not None:
            telemetry.emit(
                "record.missing",
                group=self._group,
                origin=progress.origin,
                offset=missing.offset,
                count=missing.number,
                before=missing.before,
                after=missing.after,
            )

    def get_seconds(self, progress: Progress) -> float:
        """The seconds after which a block of the partition ends."""
        declared = self._declared[progress.partition[0]]
        return declared.block_seconds or self._block_seconds

    def get_budget(self, progress: Progress) -> float:
        """The seconds that a block of the partition should take at the most."""
        timeout = self._declared[progress.partition[0]].timeout
        return min(self.get_seconds(progress), timeout)

    def _tell_applied(self, progress: Progress, count: int) -> None:
        if telemetry.listened("records.applied"):
            telemetry.emit(
                "records.applied",
                group=self._group,
                origin=progress.origin,
                count=count,
            )
