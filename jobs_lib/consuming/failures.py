"""What becomes of a record that cannot be read or handled.

Its partition stops there, and tries it again. The table `offsets` says at which record,
why, and since when. Or, if its declaration says so, the record goes into the table
`skipped` in the transaction that moves the offset past it.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from jobs_lib import telemetry
from jobs_lib.consuming.blame import is_of_record
from jobs_lib.consuming.offsets import ENDED, MOVED
from jobs_lib.consuming.progress import Undone, get_offset
from jobs_lib.consuming.subscription import BlockError
from jobs_lib.errors import FencedError, RecordError
from jobs_lib.kafka.timestamps import read_timestamp
from jobs_lib.masking import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from confluent_kafka import Message

    from jobs_lib.consuming.offsets import Offsets
    from jobs_lib.consuming.progress import Progress
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.kafka.member import Partition
    from jobs_lib.postgres.session import Session

_NOTE_PAUSE = 1.0
"""Seconds between two notes of one partition."""
_NOTE_AGAIN = 30.0
"""Seconds after which a note that says the same is written again: a failover may have
lost it."""
_ALARM_PAUSE = 10.0
"""Seconds between two alarms of one partition."""


class _Note(NamedTuple):
    """Why a partition stands still, as the table says it."""

    epoch: int
    stored: int | None
    offset: int
    error: str


class Failures:
    """Decides what becomes of records that fail; used by the threads of a consumer."""

    def __init__(
        self,
        group: str,
        declared: Mapping[str, Subscription],
        offsets: Offsets,
        move: Callable[[Progress, int, int], None],
    ) -> None:
        """Prepare.

        Args:
            group: the consumer group.
            declared: what to do with the records of each topic.
            offsets: of the group, in the database.
            move: called with a partition, its next offset, and the number of waiting
                records before that offset, once they are committed.
        """
        self._group = group
        self._declared = declared
        self._offsets = offsets
        self._move = move
        self._alarms = Alarms(group)
        # A partition is busy while a thread is here with it, so no two write one key.
        self._noted: dict[Partition, tuple[_Note, float]] = {}
        """What was written last, and when."""
        self._unwritten: dict[Partition, _Note] = {}
        """What could not be written, because the connection was lost."""

    def note_error(
        self,
        connection: Session[Any],
        progress: Progress,
        block: list[Message],
        error: BaseException,
    ) -> None:
        """Note why a block was undone; the connection still works."""
        if isinstance(error, BlockError):
            self.note(connection, progress, block, error.index, error.error)
        elif getattr(error, "sqlstate", None) == ENDED:
            ended = RecordError(
                "its handler has ended the transaction: leave commit and rollback to "
                "jobs_lib, and wrap what may fail in `with conn.transaction():`"
            )
            self.note(connection, progress, block, None, ended)
        elif not self._is_refused(progress, error):
            # After a deadlock, or without a table, no record needs to be searched for.
            index = None if is_of_record(error) else 0
            self.note(connection, progress, block, index, error)

    def note_loss(
        self, progress: Progress, block: list[Message], error: BaseException
    ) -> None:
        """Note a lost connection: the record is to blame only if it happens again."""
        first = get_offset(block[0])
        if progress.lost_at == first:
            # Rows of a read model are written together: which one it is, is not known.
            index, why = None, error
            if isinstance(error, BlockError):
                index, why = error.index, error.error
            self.note(None, progress, block, index, why)
        progress.lost_at = first
        progress.unsure_until = get_offset(block[-1]) + 1

    def note(
        self,
        connection: Session[Any] | None,
        progress: Progress,
        block: list[Message],
        index: int | None,
        error: BaseException,
    ) -> None:
        """Stop the partition at a record until it can be applied, or skip the record.

        Args:
            connection: without a transaction; None if it is lost.
            progress: the partition.
            block: the records that were undone.
            index: of the record that has failed; None if that is not known.
            error: says why.
        """
        if connection is not None and not self._offsets.owns(connection, progress):
            # The next owner may have changed already what the record needs.
            self._is_refused(progress, _is_gone(progress))
            return
        has_failed = progress.failed == get_offset(block[0])
        if not progress.note_failure(block, index):
            if index is None:
                progress.undone = Undone(len(block), describe(error))
            return
        progress.undone = None
        may_skip = self._declared[progress.partition[0]].on_error == "skip"
        if connection is not None and may_skip and is_of_record(error):
            # What nobody can tell from a fault of the record, such as a deadlock that
            # the handler has caught, is over at the second attempt.
            progress.retry_at = 0.0
            if has_failed:
                self._skip(connection, progress, block[0], error)
            return
        text = describe(error)
        telemetry.emit(
            "record.failed",
            group=self._group,
            origin=progress.origin,
            offset=progress.failed,
            error=text,
        )
        self.note_stop(connection, progress, get_offset(block[0]), text)

    def tell_undone(self, progress: Progress) -> None:
        """Tell of a block that failed, although none of its records fails alone."""
        if undone := progress.find_undone():
            telemetry.emit(
                "block.failed",
                group=self._group,
                origin=progress.origin,
                count=undone.records,
                error=undone.error,
            )

    def note_stop(
        self,
        connection: Session[Any] | None,
        progress: Progress,
        offset: int,
        error: str,
    ) -> None:
        """Write down where and why the partition stands still, unless it is written.

        Args:
            connection: without a transaction; None if it is lost.
            progress: the partition.
            offset: of the record at which it stands still.
            error: says why, without values.
        """
        note = _Note(progress.epoch, progress.stored, offset, error)
        now = time.monotonic()
        written, at = self._noted.get(progress.partition, (None, -_NOTE_AGAIN))
        if now < at + (_NOTE_AGAIN if note == written else _NOTE_PAUSE):
            return
        if connection is None:
            self._unwritten[progress.partition] = note
            return
        self._unwritten.pop(progress.partition, None)
        try:
            self._offsets.note_failure(connection, progress, offset, error)
        except psycopg.Error as failure:
            self._tell(connection, failure)
            return
        self._noted[progress.partition] = note, now

    def has_noted(self, progress: Progress, error: str) -> bool:
        """Whether the last note of a partition begins so."""
        note, _ = self._noted.get(progress.partition, (None, 0.0))
        return note is not None and (
            note.epoch == progress.epoch and note.error.startswith(error)
        )

    def forget(self, progress: Progress) -> None:
        """Write the next note down in any case: the database may have lost the last."""
        self._noted.pop(progress.partition, None)

    def write_late(self, connection: Session[Any], progress: Progress) -> None:
        """Write down what could not be written, because the connection was lost."""
        note = self._unwritten.pop(progress.partition, None)
        ours = (progress.epoch, progress.stored)
        if note is not None and (note.epoch, note.stored) == ours:
            self.note_stop(connection, progress, note.offset, note.error)

    def clear(self, connection: Session[Any], progress: Progress) -> None:
        """Write down that the partition goes on; a moved offset says so by itself."""
        self._noted.pop(progress.partition, None)
        self._unwritten.pop(progress.partition, None)
        try:
            self._offsets.clear_failure(connection, progress)
        except psycopg.Error as failure:
            self._tell(connection, failure)

    def tell(self, leaving: Collection[str] = ()) -> None:
        """Raise the alarms that are due.

        Args:
            leaving: partitions that are given away: their alarms are due at once.
        """
        self._alarms.tell(leaving)

    def _skip(
        self,
        connection: Session[Any],
        progress: Progress,
        message: Message,
        error: BaseException,
    ) -> None:
        """Note the record's place and pass it over, in one transaction."""
        text = describe(error)
        offset = get_offset(message)
        try:
            self._offsets.skip(
                connection, progress, offset, text, read_timestamp(message)
            )
        except (FencedError, psycopg.Error) as refused:
            if connection.closed:
                raise
            connection.rollback()
            if not self._is_refused(progress, refused):
                progress.wait_longer()
                telemetry.emit(
                    "loop.failed", loop=f"consume {self._group}", error=refused
                )
            return
        self._move(progress, offset + 1, 1)
        self._alarms.add(progress.origin, offset, text)

    def _is_refused(self, progress: Progress, error: BaseException) -> bool:
        """Whether another process has the partition, or somebody moved its offset."""
        if getattr(error, "sqlstate", None) == MOVED:
            progress.in_doubt = True
            return True
        if isinstance(error, FencedError):
            progress.leaving = True
            telemetry.emit("loop.failed", loop=f"consume {self._group}", error=error)
            return True
        return False

    def _tell(self, connection: Session[Any], error: psycopg.Error) -> None:
        """Go on without a note: nothing depends on it, except what people see."""
        if connection.closed:
            raise error
        connection.rollback()
        telemetry.emit("loop.failed", loop=f"consume {self._group}", error=error)


class _Skipped(NamedTuple):
    """Records of a partition that were skipped since its last alarm."""

    number: int
    offset: int
    error: str


def _is_gone(progress: Progress) -> FencedError:
    why = (
        "This process has let it go before its handler had ended "
        "(JOBS_LIB_HANDOVER_TIMEOUT)"
        if progress.leaving
        else "Another process has taken over"
    )
    return FencedError(
        f"partition {progress.origin} is no longer owned at epoch {progress.epoch}. "
        f"{why}; nothing was changed"
    )


class Alarms:
    """Tells of skipped records: of a partition's first at once, then how many more.

    Args:
        group: the consumer group.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._untold: dict[str, _Skipped] = {}
        self._told_at: dict[str, float] = {}

    def add(self, origin: str, offset: int, error: str) -> None:
        """Note a record that was skipped, and raise the alarm if it is due."""
        with self._lock:
            before = self._untold[origin].number if origin in self._untold else 0
            self._untold[origin] = _Skipped(before + 1, offset, error)
        self.tell()

    def tell(self, leaving: Collection[str] = ()) -> None:
        """Raise the alarms that are due, and those of partitions that leave."""
        if not self._untold:
            return
        now = time.monotonic()
        with self._lock:
            due = {
                origin: self._untold.pop(origin)
                for origin in list(self._untold)
                if origin in leaving
                or now >= self._told_at.get(origin, -math.inf) + _ALARM_PAUSE
            }
            self._told_at.update(dict.fromkeys(due, now))
        for origin, skipped in due.items():
            telemetry.emit(
                "record.skipped",
                group=self._group,
                origin=origin,
                offset=skipped.offset,
                error=skipped.error,
                count=skipped.number,
            )
