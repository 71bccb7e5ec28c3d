"""Share origins that no consumer group assigns among the live executors."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import UnavailableError
from jobs_lib.kafka.client import list_partitions
from jobs_lib.ownership.database import DatabaseSource
from jobs_lib.ownership.filled import FilledOrigins

if TYPE_CHECKING:
    from collections.abc import Iterable

    import psycopg

    from jobs_lib.ownership.process import Process
    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings

_ASK_EVERY = 30.0


class OrphanSource(DatabaseSource):
    """Shares the origins that hold jobs and that Kafka assigns to no process.

    These are origins of topics that no live executor follows, of partitions that Kafka
    does not have, and of topics that are gone. Kafka must say so twice in a row. While
    it does not answer, its last answer counts. A name such as ``orders/007`` is that of
    no partition, too.
    """

    def __init__(
        self,
        database: Database,
        process: Process,
        settings: Settings,
        consumed: Iterable[str],
    ) -> None:
        """Prepare to watch.

        Args:
            database: where the jobs are.
            process: this process.
            settings: where Kafka is, and the interval of polls.
            consumed: the topics whose partitions the executors follow.
        """
        super().__init__(
            database,
            process,
            process.role,
            lambda _: (),
            self._find,
            interval=settings.heartbeat_interval,
            stale_after=settings.stale_after,
        )
        self._settings = settings
        self._consumed = frozenset(consumed)
        self._filled = FilledOrigins(database)
        self._asked_at = -math.inf
        self._last: dict[str, int] | None = None
        self._agreed: dict[str, int] = {}
        """The partitions of each consumed topic, as two answers in a row agree."""

    def _find(self, connection: psycopg.Connection[Any]) -> list[str]:
        if time.monotonic() - self._asked_at > _ASK_EVERY:
            self._ask()
        return [o for o in self._filled.find(connection) if self._is_orphan(o)]

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        try:
            read = list_partitions(self._settings, self._consumed)
        except UnavailableError:
            self._last = None
            return
        if self._last is not None:
            self._agreed = {
                topic: max(read[topic], self._last[topic]) for topic in self._consumed
            }
        self._last = read

    def _is_orphan(self, origin: str) -> bool:
        topic, _, number = origin.rpartition("/")
        if topic not in self._consumed:
            return True
        # SQL takes such a name, too, and Kafka gives it to nobody.
        if number != str(int(number)):
            return True
        return topic in self._agreed and int(number) >= self._agreed[topic]
