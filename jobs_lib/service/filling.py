"""Whether new read models have been filled: a process that lacks one is not ready."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import JobsError, TopicError
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

    The ends are those that the topics had when the process started. A group that has
    once read a topic to its end is new no more, in any process.
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

    def note_ends(self) -> None:
        """Note the ends that the topics of new read models have now.

        Those that nobody can tell now are noted at the first look that can.
        """
        with self._lock:
            for declared in self._open:
                try:
                    if declared.is_current and not self._read_stored(declared)[0]:
                        self._find_ends(declared)
                except TopicError:
                    continue
                except Exception:
                    # The others would wait as long. The answer of the probe says why.
                    return

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
        is_filled, stored = self._read_stored(declared)
        if is_filled:
            return None
        ends = self._find_ends(declared)
        group, topic = declared.group, declared.topic
        if left := count_left(self._settings, group, topic, stored, ends):
            return f"{declared.topic} is read for the first time: {left} offsets left"
        self._ask("note_filled", declared)
        return None

    def _read_stored(
        self, declared: Subscription
    ) -> tuple[bool, dict[int, int | None]]:
        """Whether one has been filled before, and the offsets that are stored."""
        rows = self._ask("read_filling", declared)
        return rows[0][0], {number: at for _, number, at in rows if number is not None}

    def _ask(self, query: str, declared: Subscription) -> list[tuple[Any, ...]]:
        names = {"group": declared.group, "topic": declared.topic}
        with (
            self._database.connect("readiness", impatient=True) as connection,
            connection.transaction(),
        ):
            statement = self._database.queries[query]
            return connection.execute(statement, names).fetchall()

    def _find_ends(self, declared: Subscription) -> dict[int, int]:
        """Find the ends that one must reach; they never change."""
        name = declared.group, declared.topic
        if name not in self._ends:
            self._ends[name] = find_places(self._settings, declared.topic, "end")
        return self._ends[name]
