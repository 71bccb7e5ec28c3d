"""A re-synchronisation: the topic of a read model is read again, from a group apart.

The group of the running service goes on meanwhile. Both write the same tables, and no
version falls. What the re-synchronisation knows is in the database, so that any process
may go on with it.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from jobs_lib import telemetry
from jobs_lib.consuming.subscription import Subscription
from jobs_lib.errors import OperatingError
from jobs_lib.kafka.client import read_topic_ids
from jobs_lib.kafka.places import (
    delete_group,
    find_places,
    keeps_all_keys,
    read_committed,
)
from jobs_lib.naming import Exact

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    import psycopg

    from jobs_lib.consuming.read_model import ReadModel
    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings

START = "start"
_FOREIGN = re.compile(r"[^a-zA-Z0-9._-]")
_ROWS = 5_000


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
        self._settings = settings
        self._database = database
        self._declared = declared
        self._model: ReadModel = declared.model
        self.group: str | None = None
        """Its consumer group, once it has begun."""

    def begin(self, at: datetime | None = None) -> bool:
        """Begin, unless it has begun already.

        Args:
            at: the time in Kafka from which on records are read; None for all records.

        Returns False if it goes on with one that has begun before.

        Raises:
            OperatingError: one has begun that reads from another place.
            TopicError: the topic does not exist, or is not visible.
            UnavailableError: no broker answers.
        """
        topic = self._declared.topic
        begins = START if at is None else at.isoformat()
        starts = find_places(self._settings, topic, "start" if at is None else at)
        given: dict[str, Any] = {
            "model": self._model.name,
            "topic": topic,
            "topic_id": read_topic_ids(self._settings, [topic]).get(topic),
            "group": name_group(self._declared.group, self._model.name),
            "begins": begins,
        }
        with self._open() as connection:
            begun = self._execute(connection, "begin_resync", given).fetchone()
            if begun is None:
                self.group = self._find_group(connection, begins)
                return False
            self.group = str(given["group"])
            if at is None:
                self._note_keys(connection, topic)
            # Behind the records of all keys that are noted: one that is made from now
            # on may lie behind these ends, and must not be missed.
            ends = find_places(self._settings, topic, "end")
            given["partitions"] = [*ends]
            given["starts"] = [starts.get(number, 0) for number in ends]
            given["ends"] = [*ends.values()]
            self._execute(connection, "note_resync_parts", given)
            self._execute(connection, "begin_resync_offsets", given)
        return True

    def _note_keys(self, connection: psycopg.Connection[Any], topic: str) -> None:
        """Note all keys of the model, if the topic shows all that there are."""
        if keeps_all_keys(self._settings, topic):
            self._model.note_keys(connection)
            return
        telemetry.logger.warning(
            "%r deletes old records, as its cleanup.policy says: rows whose keys it "
            "does not show stay",
            topic,
        )

    def make_subscription(self) -> Subscription:
        """What its group does with the topic: the rows alone, without any effects."""
        assert self.group is not None
        other = Subscription(
            Exact(self._declared.topic), Exact(self.group), lambda: self._settings
        )
        other.copy_model(self._declared)
        return other

    def list_parts(self) -> list[Part]:
        """How far it is, by partition; empty if there is none.

        Raises:
            UnavailableError: no broker answers.
        """
        with self._open() as connection:
            rows = self._execute(
                connection, "read_resync_parts", {"model": self._model.name}
            ).fetchall()
        if not rows:
            return []
        topic, group = rows[0][4:]
        # Kafka is also told of places behind which no record is left.
        told = read_committed(self._settings, group, topic)
        return [
            Part(number, start, end, max(start, at or 0, told.get(number, 0)))
            for number, start, end, at, _, _ in rows
        ]

    def end(self) -> int:
        """Remove what the topic did not show, and forget the re-synchronisation.

        Returns the number of keys whose rows were removed.

        Raises:
            OperatingError: it has not reached all ends, or cannot know what the topic
                has; nothing was removed.
        """
        removed = 0
        name = {"model": self._model.name}
        with self._open() as connection:
            row = self._execute(connection, "read_resync", name).fetchone()
        if row is None:
            # Another process has ended it, while this one still had partitions.
            self._forget_group(self.group)
            return 0
        topic, topic_id, group, begins, _ = row
        if begins == START:
            self._check_seen_all(topic, topic_id, group)
            while True:
                with self._open() as connection:
                    looked, gone = self._model.remove_unshown(connection, _ROWS)
                removed += gone
                if not looked:
                    break
        self.forget()
        return removed

    def forget(self) -> None:
        """Forget it: no process goes on with it, and nothing is removed."""
        name = {"model": self._model.name}
        with self._open() as connection:
            row = self._execute(connection, "read_resync", name).fetchone()
            self._execute(connection, "end_resync", name)
        self._forget_group(self.group if row is None else row[2])

    def _forget_group(self, group: str | None) -> None:
        if group is None:
            return
        given = {"group": group, "topic": self._declared.topic}
        with self._open() as connection:
            self._execute(connection, "end_resync_group", given)
        delete_group(self._settings, group)

    def _find_group(self, connection: psycopg.Connection[Any], begins: str) -> str:
        """Find the group of the one that has begun, if it reads from the same place."""
        row = self._execute(
            connection, "read_resync", {"model": self._model.name}
        ).fetchone()
        if row is None:
            raise OperatingError(
                f"the re-synchronisation of {self._model.name} has just ended in "
                "another process: call it again to begin another one"
            )
        if row[3] != begins:
            raise OperatingError(
                f"a re-synchronisation of {self._model.name} that reads from {row[3]} "
                f"has begun at {row[4]:%Y-%m-%d %H:%M:%S %Z}: call it with the same "
                "place to go on with it, or end it with --cancel"
            )
        return str(row[2])

    def _check_seen_all(self, topic: str, topic_id: object, group: str) -> None:
        if read_topic_ids(self._settings, [topic]).get(topic) != topic_id:
            raise OperatingError(
                f"{topic!r} was deleted and made anew since the re-synchronisation "
                "began: end it with --cancel, and begin again"
            )
        given = {"group": group, "topic": topic}
        with self._open() as connection:
            row = self._execute(connection, "count_resync_skipped", given).fetchone()
        if row is not None and row[0]:
            raise OperatingError(
                f"{row[0]} records of {topic!r} cannot be read, so that nobody knows "
                "which keys the topic has: no row was removed. Repair the cause and "
                "begin again, or end it with --cancel"
            )

    def _execute(
        self, connection: psycopg.Connection[Any], query: str, given: dict[str, Any]
    ) -> psycopg.Cursor[Any]:
        return connection.execute(self._database.queries[query], given)

    @contextmanager
    def _open(self) -> Iterator[psycopg.Connection[Any]]:
        name = "resync"
        with self._database.connect(name) as connection, connection.transaction():
            yield connection
