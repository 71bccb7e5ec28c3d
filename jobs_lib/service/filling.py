"""Whether new read models have been filled: a process that lacks one is not ready."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import JobsError
from jobs_lib.kafka.places import count_left, find_places
from jobs_lib.masking import describe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings

_LOOK_SECONDS = 1.0


class Filling:
    """Looks how far new read models are, until all have reached their topics' ends.

    The ends are those that the topics had at the first look. A group that has once
    read a topic to its end is new no more, in any process.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        declared: Iterable[Subscription],
    ) -> None:
        """Prepare.

        Args:
            settings: where Kafka is.
            database: with the read models.
            declared: what this process reads.
        """
        self._settings = settings
        self._database = database
        self._open = [one for one in declared if one.is_read_model]
        """The read models that may not be filled yet."""
        self._ends: dict[tuple[str, str], dict[int, int]] = {}
        """The ends that they must reach, by group and topic."""
        self._lock = threading.Lock()
        self._looked_at = 0.0
        self._reason: str | None = None

    def explain(self) -> str | None:
        """Say which read model is not filled yet, and why; None if all are.

        It asks PostgreSQL and Kafka, once a second at the most, while one is not.
        """
        with self._lock:
            if self._open and time.monotonic() > self._looked_at + _LOOK_SECONDS:
                self._look()
                self._looked_at = time.monotonic()
            return self._reason if self._open else None

    def _look(self) -> None:
        try:
            while self._open:
                if (reason := self._explain(self._open[0])) is not None:
                    self._reason = reason
                    return
                del self._open[0]
        except JobsError as error:
            self._reason = f"nobody knows whether its read models are filled: {error}"
        except Exception as error:
            # The answer of the probe shows it, and nothing else would.
            self._reason = describe(error)

    def _explain(self, declared: Subscription) -> str | None:
        """Say how far one is; None if it is filled."""
        # Nobody reads a version that is filled beside another one.
        if not declared.is_current:
            return None
        rows = self._ask("read_filling", declared)
        if rows[0][0]:
            return None
        left = self._count_left(declared, {n: at for _, n, at in rows if n is not None})
        if left:
            return f"{declared.topic} is read for the first time: {left} offsets left"
        self._ask("note_filled", declared)
        return None

    def _ask(self, query: str, declared: Subscription) -> list[tuple[Any, ...]]:
        names = {"group": declared.group, "topic": declared.topic}
        with (
            self._database.connect("readiness") as connection,
            connection.transaction(),
        ):
            statement = self._database.queries[query]
            return connection.execute(statement, names).fetchall()

    def _count_left(self, declared: Subscription, stored: dict[int, int | None]) -> int:
        """Count the offsets before the ends that its group has not passed."""
        group, topic = declared.group, declared.topic
        ends = self._ends.get((group, topic))
        if ends is None:
            ends = find_places(self._settings, topic, "end")
            self._ends[group, topic] = ends
        return count_left(self._settings, group, topic, stored, ends)
