"""Looks at what may change behind a consumer: its offsets, and its topics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from jobs_lib.consuming.commits import Commits
    from jobs_lib.consuming.offsets import Offsets
    from jobs_lib.consuming.progress import Progress
    from jobs_lib.kafka.member import Partition
    from jobs_lib.kafka.topic_ids import TopicIds
    from jobs_lib.postgres.session import Session


class Looks:
    """Notices offsets that somebody has moved, and topics that were made anew."""

    def __init__(
        self,
        offsets: Offsets,
        topic_ids: TopicIds,
        partitions: Mapping[Partition, Progress],
        lock: threading.Condition,
        commits: Commits,
        heartbeat: float,
    ) -> None:
        """Prepare.

        Args:
            offsets: of the group, in the database.
            topic_ids: asks Kafka which topics these are.
            partitions: those that the consumer owns, always the same object.
            lock: guards the partitions.
            commits: tell Kafka where partitions go on.
            heartbeat: seconds between two looks.
        """
        self._offsets = offsets
        self._topic_ids = topic_ids
        self._partitions = partitions
        self._lock = lock
        self._commits = commits
        self._heartbeat = heartbeat
        self._looked_at = 0.0

    def doubt_all(self) -> None:
        """Read all offsets again before anything else is applied."""
        with self._lock:
            for progress in self._partitions.values():
                progress.in_doubt = True

    def look(self, connection: Session[Any]) -> bool:
        """Look once in a heartbeat; returns whether it was time."""
        with self._lock:
            now = time.monotonic()
            if now < self._looked_at + self._heartbeat:
                return False
            self._looked_at = now
            ours = {
                one.partition: one.stored
                for one in self._partitions.values()
                if not (one.busy or one.leaving or one.in_doubt)
            }
        self._look_at_topics()
        if ours:
            self._compare(connection, ours)
        return True

    def _compare(
        self, connection: Session[Any], ours: Mapping[Partition, int | None]
    ) -> None:
        stored = self._offsets.read(connection, list(ours))
        with self._lock:
            for partition, before in ours.items():
                progress = self._partitions.get(partition)
                # A block that was committed meanwhile has moved it, too.
                if progress is None or progress.busy or progress.stored != before:
                    continue
                progress.in_doubt |= stored.get(partition) != before

    def _look_at_topics(self) -> None:
        """Notice topics that were made anew, and that the client goes on reading."""
        ids = self._topic_ids.poll()
        if not ids:
            return
        with self._lock:
            for (topic, _), progress in self._partitions.items():
                known, found = progress.topic_id, ids.get(topic)
                if found is None or known == found:
                    continue
                # If Kafka named no id when the partition was taken, the one in the
                # database is compared.
                progress.replaced = True
                if known is not None:
                    self._commits.note_anew(progress.partition)
