"""How far the jobs of a group's records are done: told to the group ``<group>.done``.

A record is done when no job with its place is unfinished. The owner of a partition
finds the lowest place that is not, and commits it for a group that has no members.
What Kafka has may lag, and never leads. It is committed again and again: a process that
was stopped may put an older offset in its place, and Kafka forgets the offsets of a
group without members after some days.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.consuming.sent import Sent
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from uuid import UUID

    from jobs_lib.consuming.derived import Derived
    from jobs_lib.consuming.progress import Progress
    from jobs_lib.kafka.member import Partition
    from jobs_lib.kafka.outside import OutsideCommitter
    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.session import Session

_PAUSE = 1.0
_AGAIN = 10.0
"""Seconds after which all offsets are committed again."""
_SWEPT = 1_000
"""Kept places of a partition that one statement looks at."""
_OLD = 2.0
"""Seconds after which what was found is looked up once more before it is told."""
_LAST_SECONDS = 1.0


class Done:
    """Tells how far the jobs of one group are done; a thread of its own."""

    def __init__(
        self,
        database: Database,
        committer: OutsideCommitter,
        group: str,
        owner: UUID,
        owned: Callable[[], Mapping[Partition, Progress]],
        find_reached: Callable[[Partition, int | None], int | None],
        sent: Collection[str] = (),
        derived: Derived | None = None,
    ) -> None:
        """Prepare.

        Args:
            database: has the jobs and the offsets.
            committer: of the group ``<group>.done``.
            group: the consumer group.
            owner: this process.
            owned: finds the partitions to tell of, which this process owns.
            find_reached: finds the place up to which no record follows a stored offset.
            sent: topics whose records are done only when what they have led to is in
                Kafka.
            derived: finds how far the topics are done that others are made of.
        """
        self._database = database
        self._committer = committer
        self._group = group
        self._owner = owner
        self._owned = owned
        self._find_reached = find_reached
        self._topics_sent = frozenset(sent)
        self._derived = derived
        self._soon = threading.Event()
        self._told: dict[Partition, int] = {}
        """The offsets that Kafka has acknowledged."""
        self._told_at = 0.0
        self._is_second = False
        """Whether it looks once more, because what it had found became too old."""
        self._loop = Loop(f"done {group}", self._work, ended=committer.close)
        self.pulse = self._loop.pulse

    def start(self) -> None:
        """Start the thread; it tells nothing until partitions are taken."""
        self._loop.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._loop.stopping.set()
        self._soon.set()
        # Kafka may not answer, and nothing is lost: the next owner tells it again.
        self._loop.stop(_LAST_SECONDS)

    def tell_soon(self) -> None:
        """Tell of all partitions soon: some are new."""
        self._told_at = 0.0
        self._soon.set()

    def _work(self) -> Iterator[None]:
        with self._database.connect(self._loop.name, impatient=True) as connection:
            # Another server may lack commits, so all of it is found out again.
            sent = Sent(lambda: self._database.queries)
            self._is_second = False
            while not self._loop.stopping.is_set():
                self._soon.clear()
                if owned := self._owned():
                    self._tell(connection, owned, sent)
                yield
                self._soon.wait(_PAUSE)

    def _tell(
        self,
        connection: Session[Any],
        owned: Mapping[Partition, Progress],
        sent: Sent,
    ) -> None:
        # Of a topic that was made anew nothing is done, and the stored offset is one of
        # the topic before. The same goes for a partition that ended before its offset.
        # It may have been told, too, until somebody noticed.
        anew = {one for one, progress in owned.items() if progress.has_other_records}
        owned = {one: progress for one, progress in owned.items() if one not in anew}
        found_at, found, empty = self._look(connection, owned)
        offsets = {(topic, number): done for topic, number, done, _ in found}
        for topic, number, done, is_all in found:
            # Behind the last record lie markers, which nobody handles.
            if is_all:
                reached = self._find_reached((topic, number), done)
                offsets[topic, number] = done if reached is None else reached
        if self._topics_sent:
            kept = {
                one: at for one, at in offsets.items() if one[0] in self._topics_sent
            }
            offsets = {
                one: at for one, at in offsets.items() if one not in kept
            } | sent.find(connection, kept)
        if self._derived is not None:
            # A partition without any record has no offset, and nothing to be done.
            nothing = {one: self._find_reached(one, None) or 0 for one in empty}
            new = [one for one in empty if owned[one].is_untouched]
            offsets |= self._derived.find(nothing | offsets, new)
        self._commit(offsets | dict.fromkeys(anew, 0), found_at)

    def _look(
        self, connection: Session[Any], owned: Mapping[Partition, Progress]
    ) -> tuple[float, list[tuple[str, int, int, bool]], list[Partition]]:
        """Look how far those partitions are done that are still ours.

        Returns when it did, what it has found, and the partitions without an offset.
        """
        asked = {
            "group": self._group,
            "owner": self._owner,
            "origins": [one.origin for one in owned.values()],
            "epochs": [one.epoch for one in owned.values()],
        }
        queries = self._database.queries
        while True:
            swept = connection.execute(
                queries["sweep_places"], asked | {"rows": _SWEPT}
            ).rowcount
            # After each: so the next sweep begins where this one has ended.
            found_at = time.monotonic()
            rows = connection.execute(queries["find_done"], asked).fetchall()
            if swept < _SWEPT:
                break
            self.pulse.beat()
        found = [row for row in rows if row[2] is not None]
        empty = [(row[0], row[1]) for row in rows if row[2] is None]
        return found_at, found, empty

    def _commit(self, offsets: Mapping[Partition, int], found_at: float) -> None:
        now = time.monotonic()
        # The process may have stood still, and the offsets been set back meanwhile. A
        # server that is always slow must not keep it from telling.
        self._is_second = now > found_at + _OLD and not self._is_second
        if self._is_second:
            self._soon.set()
            return
        if now >= self._told_at + _AGAIN:
            self._told.clear()
        new = {
            one: offset
            for one, offset in offsets.items()
            if self._told.get(one) != offset
        }
        if not new:
            return
        is_all = not self._told
        # Kafka may not answer for a long time.
        with self.pulse.elsewhere():
            self._committer.commit(new)
        self._told.update(new)
        if is_all:
            self._told_at = now
        telemetry.emit(
            "done.committed",
            group=self._group,
            offsets={f"{topic}/{number}": at for (topic, number), at in new.items()},
        )
