"""A re-synchronisation: the topic of a read model is read again, from a group apart.

The group of the running service goes on meanwhile. Both write the same tables, and no
version falls. What the re-synchronisation knows is in the database, so that any process
may go on with it.
"""

from __future__ import annotations

import math
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from jobs_lib import telemetry
from jobs_lib.errors import OperatingError, UnavailableError
from jobs_lib.kafka.client import read_topic_ids
from jobs_lib.kafka.places import (
    delete_group,
    find_left,
    find_places,
    find_starts,
    keeps_all_keys,
)
from jobs_lib.kafka.reader import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime
    from uuid import UUID

    import psycopg

    from jobs_lib.consuming.read_model import ReadModel
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings

START: Final = "start"
_FOREIGN = re.compile(r"[^a-zA-Z0-9._-]")
_ROWS = 5_000
_NEW_SECONDS = 60.0
"""How old the ends may be that a process has reached before rows go, if newer ones are
reached sooner."""


@dataclass(frozen=True, slots=True)
class Part:
    """How far a re-synchronisation is in a partition."""

    partition: int
    start: int
    """Where it began."""
    end: int
    """The partition's end when it began, which it must reach."""
    at: int
    """Where it goes on."""

    @property
    def is_done(self) -> bool:
        """Whether everything before the end was applied."""
        return self.at >= self.end


class Ended(NamedTuple):
    """What a process has done at the end of a re-synchronisation."""

    removed: int
    """Of how many keys this process has removed the rows."""
    is_last: bool
    """Whether it has ended the work; False if another process has."""


class _Begun(NamedTuple):
    """What the database knows of a re-synchronisation that has not ended."""

    topic: str
    topic_id: UUID | None
    group: str
    begins: str
    """From where it reads."""
    started_at: datetime


def name_group(group: str, table: str) -> str:
    """Name a new group that re-synchronises a table of another group.

    One that was there before has offsets in Kafka, which would seem to be this one's.
    """
    return f"{group}.resync.{_FOREIGN.sub('-', table)}.{uuid4().hex[:8]}"


class Resync:
    """The re-synchronisation of one read model.

    Args:
        settings: where Kafka is.
        database: with the tables.
        declared: what the running service does with the topic.
    """

    def __init__(
        self, settings: Settings, database: Database, declared: Subscription
    ) -> None:
        if declared.model is None:
            raise OperatingError(
                f"the group {declared.group!r} keeps no read model of "
                f"{declared.topic!r}: only a read model can be re-synchronised"
            )
        self.settings = settings
        self._database = database
        self._declared = declared
        self._model: ReadModel = declared.model
        self.group: str | None = None
        """Its consumer group, once it has begun."""
        self._empty: dict[int, Span] = {}
        """By partition, what has no record to apply; none can appear there."""
        self._ends: dict[int, int] = {}
        """The ends that this process has taken since, which must be reached, too."""
        self._ends_at = -math.inf
        self._reached_in = math.inf
        """Seconds that it took to reach the ends before these."""
        self._has_last_ends = False
        """Whether the ends were taken since all rows to be removed are gone."""
        self._removed = 0

    def begin(
        self, at: datetime | int | None = None, partition: int | None = None
    ) -> bool:
        """Begin, unless it has begun already.

        Args:
            at: the time in Kafka, or the offset of the partition, from which on records
                are read; None for all records.
            partition: read only this one; None for all.

        Returns False if it goes on with one that has begun before.

        Raises:
            OperatingError: one has begun that reads from another place; or the topic
                has no such partition, or no record there; or the tables have got other
                names just now.
            TopicError: the topic does not exist, or is not visible.
            UnavailableError: no broker answers.
        """
        topic = self._declared.topic
        begins = _name_place(at, partition)
        given: dict[str, Any] = {
            "model": self._model.name,
            "topic": topic,
            "topic_id": read_topic_ids(self.settings, [topic]).get(topic),
            "group": name_group(self._declared.group, self._model.name),
            "begins": begins,
        }
        with self._open() as connection:
            begun = self._execute(connection, "begin_resync", given).fetchone()
            self._refuse_switched(connection)
            if begun is None:
                self.group = self._find_group(connection, begins)
                return False
            self.group = str(given["group"])
            starts = find_starts(
                self.settings, topic, START if at is None else at, partition
            )
            if begins == START and self._keeps_all_keys():
                self._model.note_keys(connection)
            # Behind the records of all keys that are noted: one that is made from now
            # on may lie behind these ends, and must not be missed.
            ends = find_places(self.settings, topic, "end")
            if isinstance(at, int):
                _check_offset(topic, starts, ends)
            elif at is not None:
                _check_time(topic, at, starts, ends)
            # Partitions that are left out begin where they end.
            others = {} if partition is None else ends
            given["partitions"] = [*ends]
            given["starts"] = [starts.get(one, others.get(one, 0)) for one in ends]
            given["ends"] = [*ends.values()]
            self._execute(connection, "note_resync_parts", given)
            self._execute(connection, "begin_resync_offsets", given)
        return True

    @property
    def topic(self) -> str:
        """The name of the topic in Kafka."""
        return self._declared.topic

    def join(self, group: str) -> None:
        """Go on with the one of this group, which another process has begun."""
        self.group = group

    def make_subscription(self) -> Subscription:
        """What its group does with the topic: the rows alone, without any effects."""
        assert self.group is not None
        return self._declared.make_again(self.group)

    def list_parts(self, told: Mapping[int, int] | None = None) -> list[Part]:
        """How far it is, by partition; empty if another process has ended it.

        Args:
            told: the offsets that its group has committed to Kafka, by partition. Kafka
                is also told of places behind which no record is left. They count only
                if that is so: Kafka may know of commits that the database has lost.

        Raises:
            AccessError: Kafka denies the right to read the topic.
            TopicError: the topic does not exist, or is not visible.
            UnavailableError: no broker answers.
        """
        with self._open() as connection:
            parts = self._read_parts(connection)
        told = told or {}
        doubted = {
            part.partition: part
            for part in parts
            if not part.is_done and told.get(part.partition, 0) >= part.end
        }
        if not doubted:
            return parts
        assert self.group is not None
        left = find_left(
            self.settings,
            self.group,
            self.topic,
            {number: part.at for number, part in doubted.items()},
            {number: part.end for number, part in doubted.items()},
            told,
        )
        for number, part in doubted.items():
            if number not in left:
                self._empty[number] = Span(part.at, part.end)
        return [self._pass_empty(part) for part in parts]

    def _read_parts(self, connection: psycopg.Connection[Any]) -> list[Part]:
        rows = self._execute(connection, "read_resync_parts", self._named).fetchall()
        return [
            self._pass_empty(
                Part(
                    number,
                    start,
                    max(end, self._ends.get(number, 0)),
                    max(start, at or 0),
                )
            )
            for number, start, end, at in rows
        ]

    def _pass_empty(self, part: Part) -> Part:
        """Pass what is known to have no record, if the part has come so far."""
        empty = self._empty.get(part.partition)
        if empty is None or not (empty.start or 0) <= part.at < empty.end:
            return part
        return replace(part, at=empty.end)

    def raise_ends(self) -> bool:
        """Take the topic's ends again, if rows may go and the ends are not new.

        A state may have been sent again behind the ends that are reached. The record
        before them may be compacted away before anybody reads it, and the repeat
        changes no row: only whoever reads on sees that the topic has the key.

        If newer ends are not reached in half the time, the next ones would not be newer
        when they are reached: its gate may lag by that time for ever. A row that goes
        too early is made again by what is read afterwards.

        Returns False if no more is to be read.

        Raises:
            TopicError: the topic does not exist, or is not visible.
            UnavailableError: no broker answers.
        """
        now = time.monotonic()
        took = now - self._ends_at
        if took < _NEW_SECONDS or took > self._reached_in / 2:
            return False
        with self._open() as connection:
            if self._find_removing(connection) is None:
                return False
        self._ends = find_places(self.settings, self.topic, "end")
        self._ends_at, self._reached_in = now, took
        return True

    def check_topic(self) -> None:
        """Refuse to go on if the topic was made anew: it need not reach the old ends.

        Raises:
            OperatingError: it was.
            UnavailableError: no broker answers.
        """
        with self._open() as connection:
            begun = self._read_own(connection)
        if begun is None:
            return
        found = read_topic_ids(self.settings, [begun.topic]).get(begun.topic)
        # Kafka may not know the topic for a moment.
        if found is not None:
            _refuse_other_topic(begun, found)

    def end(self) -> Ended | None:
        """Remove what the topic did not show, and forget the re-synchronisation.

        Several processes may call it at once: they take turns with the rows, and one
        of them forgets it.

        Returns None if records came while rows were removed: they must be read first,
        since one of them may show a key whose row is gone.

        Raises:
            OperatingError: it has not reached all ends, or cannot know what the topic
                has; nothing was removed. Or it has ended, and records were skipped.
            UnavailableError: no broker answers, or none knows the topic for a moment.
        """
        removes = (
            self._check_seen_all() and self._keeps_all_keys() and self._has_whole_log()
        )
        is_last, skipped = False, None
        while not is_last:
            with self._open() as connection:
                # Since the last turn another process may have ended it, and another
                # one may have begun: its keys were not shown yet.
                row = self._execute(connection, "lock_resync", self._named).fetchone()
                if row is None:
                    break
                # In the same transaction: a server that took over since the last look
                # lacks an offset and the keys that were shown before it alike.
                self._refuse_behind(connection)
                looked = gone = 0
                if removes:
                    self._model.find_unshown(connection)
                    looked, gone = self._model.remove_unshown(connection, _ROWS)
                is_last = looked < _ROWS
                if gone:
                    # Also once more, where the server has lost its last commits.
                    self._has_last_ends = False
                more = removes and is_last and self._finds_more(connection)
                if is_last and not more:
                    skipped = self._find_skipped(connection)
                    self._execute(connection, "end_resync", self._named)
            self._removed += gone
            if more:
                return None
        self._forget_group(self.group)
        if skipped is not None:
            raise OperatingError(
                f"{self._model.name} was read again to the end, but {skipped}. What "
                "they change is not in the table: repair the cause, and begin again"
            )
        return Ended(self._removed, is_last)

    def _finds_more(self, connection: psycopg.Connection[Any]) -> bool:
        """Whether the topic has got records since; call once all rows are gone.

        The service passes a state of the version that a row has without a change. If
        that row goes a moment later, only whoever reads on makes it again. A state that
        the service passes from now on makes the row itself.
        """
        if not self._has_last_ends:
            self._ends = find_places(self.settings, self.topic, "end")
            self._ends_at = time.monotonic()
            self._has_last_ends = True
        return not all(part.is_done for part in self._read_parts(connection))

    def forget(self) -> None:
        """Forget it: no process goes on with it, and nothing is removed."""
        with self._open() as connection:
            begun = self._read_begun(connection)
            self._execute(connection, "end_resync", {"model": self._model.name})
        group = self.group if begun is None else begun.group
        self._forget_group(group, is_cancelled=True)

    def leave(self) -> None:
        """Forget what this process had, if another one has ended the work meanwhile.

        That one has left the partitions which this one still had.
        """
        with self._open() as connection:
            begun = self._read_own(connection)
        if begun is None:
            self._forget_group(self.group)

    def _forget_group(self, group: str | None, *, is_cancelled: bool = False) -> None:
        if group is None:
            return
        given = {
            "group": group,
            "topic": self._declared.topic,
            "stale_after": self.settings.stale_after,
            "is_cancelled": is_cancelled,
        }
        with self._open() as connection:
            self._execute(connection, "end_resync_group", given)
        delete_group(self.settings, group)

    def _find_group(self, connection: psycopg.Connection[Any], begins: str) -> str:
        """Find the group of the one that has begun, if it reads from the same place."""
        begun = self._read_begun(connection)
        if begun is None:
            raise OperatingError(
                f"the re-synchronisation of {self._model.name} has just ended in "
                "another process: call it again to begin another one"
            )
        if begun.begins != begins:
            raise OperatingError(
                f"a re-synchronisation of {self._model.name} that reads from "
                f"{begun.begins} has begun at {begun.started_at:%Y-%m-%d %H:%M:%S %Z}: "
                "call it with the same place to go on with it, or end it with --cancel"
            )
        return begun.group

    def _refuse_switched(self, connection: psycopg.Connection[Any]) -> None:
        """Refuse tables that have other names since they were asked for.

        None gets another name from here on: a switch waits, and is then refused.
        """
        table, declared = self._declared.first_table, self._declared
        rows = self._execute(
            connection, "read_current_versions", {"models": [table]}
        ).fetchall()
        for _, current in rows:
            if (current == declared.version.number) != declared.is_current:
                raise OperatingError(
                    f"readers see another version of {table} since just now, so its "
                    "tables have other names: call it again"
                )

    def _read_begun(self, connection: psycopg.Connection[Any]) -> _Begun | None:
        """Read what is known of the model's; it may be one that began later."""
        row = self._execute(
            connection, "read_resync", {"model": self._model.name}
        ).fetchone()
        return None if row is None else _Begun(*row)

    def _read_own(self, connection: psycopg.Connection[Any]) -> _Begun | None:
        """Read what is known of this one; None if it has ended."""
        begun = self._read_begun(connection)
        return begun if begun and begun.group == self.group else None

    def _find_removing(self, connection: psycopg.Connection[Any]) -> _Begun | None:
        """Find what is known of it; None if it has ended, or no rows go at its end."""
        begun = self._read_own(connection)
        return begun if begun and begun.begins == START else None

    def _check_seen_all(self) -> bool:
        """Refuse to go on if rows are to be removed that the topic may have.

        Returns whether any are to be removed.
        """
        with self._open() as connection:
            begun = self._find_removing(connection)
            if begun is None:
                return False
            skipped = self._find_skipped(connection)
        found = read_topic_ids(self.settings, [begun.topic]).get(begun.topic)
        if found is None and begun.topic_id is not None:
            raise UnavailableError(
                f"Kafka does not know the topic {begun.topic!r} at the moment, so "
                "nobody knows whether it is still the same: no row was removed. Call "
                "the re-synchronisation again to go on with it"
            )
        _refuse_other_topic(begun, found)
        if skipped is not None:
            raise OperatingError(
                f"{skipped}. Nobody knows which keys the topic has: no row was "
                "removed. Repair the cause, end it with --cancel, and begin again"
            )
        return True

    def _find_skipped(self, connection: psycopg.Connection[Any]) -> str | None:
        """Say which records were skipped; None if none were."""
        given = {"group": self.group, "topic": self.topic}
        row = self._execute(connection, "find_resync_skipped", given).fetchone()
        if row is None:
            return None
        partition, offset, error, count = row
        return (
            f"{count} records of {self.topic!r} were skipped, the first one at offset "
            f"{offset} of partition {partition}: {error}"
        )

    def _keeps_all_keys(self) -> bool:
        """Whether the topic shows all keys that there are."""
        if keeps_all_keys(self.settings, self.topic):
            return True
        telemetry.logger.warning(
            "%r deletes old records, as its cleanup.policy says: rows whose keys it "
            "does not show stay",
            self.topic,
        )
        return False

    def _has_whole_log(self) -> bool:
        """Whether the topic kept all records from where it was begun to read.

        Where some were cut off, nobody knows if they were read before. Their keys may
        have come again behind the ends.
        """
        with self._open() as connection:
            rows = self._execute(
                connection, "read_resync_parts", self._named
            ).fetchall()
        begun = {number: start for number, start, *_ in rows}
        starts = find_places(self.settings, self.topic, "start")
        cut = [n for n, start in starts.items() if start > begun.get(n, -1)]
        if begun and cut:
            telemetry.logger.warning(
                "%s/%d begins at offset %d: since the re-synchronisation began, "
                "records were deleted or partitions added. Rows whose keys it did not "
                "show stay: begin it again to remove them",
                self.topic,
                min(cut),
                starts[min(cut)],
            )
        return not cut

    def _refuse_behind(self, connection: psycopg.Connection[Any]) -> None:
        """Refuse to end it while an end is not reached."""
        for part in self._read_parts(connection):
            if not part.is_done:
                raise OperatingError(
                    f"the re-synchronisation of {self._model.name} has applied "
                    f"{self.topic}/{part.partition} up to offset {part.at}, and must "
                    f"reach {part.end}: no row was removed. The database has lost what "
                    "was applied, or the end was called too early: call the "
                    "re-synchronisation again to go on with it"
                )

    @property
    def _named(self) -> dict[str, Any]:
        """This one: another one of the model has another group."""
        return {"model": self._model.name, "group": self.group}

    def _execute(
        self, connection: psycopg.Connection[Any], query: str, given: dict[str, Any]
    ) -> psycopg.Cursor[Any]:
        return connection.execute(self._database.queries[query], given)

    @contextmanager
    def _open(self) -> Iterator[psycopg.Connection[Any]]:
        name = "resync"
        with self._database.connect(name) as connection, connection.transaction():
            yield connection


def _name_place(at: datetime | int | None, partition: int | None) -> str:
    """Say where it begins; only from the start of all partitions it sees all keys."""
    if at is None:
        place = START
    else:
        place = f"offset {at}" if isinstance(at, int) else at.isoformat()
    return place if partition is None else f"{place} of partition {partition}"


def _refuse_other_topic(begun: _Begun, found: UUID | None) -> None:
    """Refuse to go on with another topic of the same name, where both ids are known."""
    if None not in (begun.topic_id, found) and begun.topic_id != found:
        raise OperatingError(
            f"{begun.topic!r} was deleted and made anew since the re-synchronisation "
            "began: end it with --cancel, and begin again"
        )


def _check_offset(topic: str, starts: dict[int, int], ends: dict[int, int]) -> None:
    """Refuse an offset that no record has yet: nothing would be read."""
    for partition, offset in starts.items():
        if offset >= ends[partition]:
            raise OperatingError(
                f"{topic}/{partition} has no record from offset {offset} on: its next "
                f"one gets the offset {ends[partition]}. Give an offset before that"
            )


def _check_time(
    topic: str, at: datetime, starts: dict[int, int], ends: dict[int, int]
) -> None:
    """Refuse a time since which there is no record: nothing would be read."""
    if all(offset >= ends[partition] for partition, offset in starts.items()):
        raise OperatingError(
            f"{topic!r} has no record of {at.isoformat()} or later: give an earlier "
            "time"
        )
