"""Whether new read models have been filled: a process that lacks one is not ready."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from jobs_lib.consuming.gate import Gate
from jobs_lib.errors import JobsError, OffsetError, RecordError, TopicError
from jobs_lib.kafka.dependencies import Place, find_wait
from jobs_lib.kafka.places import count_offsets, find_left, find_places
from jobs_lib.kafka.reader import PartsReader
from jobs_lib.masking import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from confluent_kafka import Message

    from jobs_lib.consuming.gate import Places
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.kafka.dependencies import Answers, Dependency
    from jobs_lib.kafka.positions import KnownOffsets
    from jobs_lib.kafka.reader import Span
    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings

_LOOK_SECONDS = 1.0
_READ_SECONDS = 5.0
"""How long a look for the next records waits for Kafka, or for an open transaction."""


class Filling:
    """Looks how far new read models are, until all have reached their topics' ends.

    The ends are those that the topics had when the process started. What a closed gate
    holds is not left to read: it may wait for a service that starts later, perhaps only
    when this one is ready. A group that has once read all that it may is new no more,
    in any process.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        declared: Iterable[Subscription],
        ask: Callable[[Dependency], KnownOffsets | None] = lambda _: None,
    ) -> None:
        """Prepare.

        Args:
            settings: where Kafka is.
            database: with the read models.
            declared: what this process reads.
            ask: says how far a group is that records wait for; None if that is not
                known now.
        """
        self._settings = settings
        self._database = database
        self._ask_group = ask
        self._open = [one for one in declared if one.is_read_model]
        """The read models that may not be filled yet."""
        self._ends: dict[tuple[str, str], dict[int, int]] = {}
        """The ends that they must reach, by group and topic."""
        self._left: dict[int, Span] = {}
        """What was left of the first one at the last look."""
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
        if not self._open:
            return None
        if not self._lock.acquire(blocking=False):
            # A look waits for servers. Probes that waited for it would become so many
            # that `/livez` gets no answer either.
            return self._reason or "its read models are being looked at"
        try:
            if self._open and time.monotonic() > self._looked_at + _LOOK_SECONDS:
                self._look()
                self._looked_at = time.monotonic()
            return self._reason if self._open else None
        finally:
            self._lock.release()

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
        if left := self._find_left(declared, stored):
            count = count_offsets(left)
            return f"{declared.topic} is read for the first time: {count} offsets left"
        self._ask("note_filled", declared)
        return None

    def _find_left(
        self, declared: Subscription, stored: dict[int, int | None]
    ) -> dict[int, Span]:
        """Find what is left to read in each partition that no closed gate holds."""
        group, topic = declared.group, declared.topic
        noted = self._find_ends(declared)
        # A topic that was made anew, or has lost its end, may never reach that again.
        now = find_places(self._settings, topic, "end")
        ends = {number: min(end, now.get(number, 0)) for number, end in noted.items()}
        left = find_left(self._settings, group, topic, stored, ends)
        if not left or not declared.after:
            return left
        answers = {one: self._ask_group(one) for one in declared.after}
        left = {
            number: span
            for number, span in left.items()
            # The next record has this offset or a higher one.
            if not _is_held(answers, {topic: Place(number, span.start or 0)})
        }
        before, self._left = self._left, left
        # As long as it moves, no gate holds it.
        return self._read_left(declared, left, answers) if left == before else left

    def _read_left(
        self, declared: Subscription, left: dict[int, Span], answers: Answers
    ) -> dict[int, Span]:
        """Leave out the partitions whose next records a gate holds, or that have none.

        It ends with the first record that may be handled: there is something left.
        """
        gate, waiting = Gate(declared.topic, declared.after), {**left}
        parts = {(declared.topic, number): span for number, span in left.items()}
        try:
            with PartsReader(
                self._settings, parts, declared.group, most=1, patience=_READ_SECONDS
            ) as reader:
                for partition, messages in reader:
                    if not _waits(gate, messages[0], answers):
                        return waiting
                    del waiting[partition[1]]
                    reader.leave(partition)
        except OffsetError:
            # An open transaction hides what it has, or the topic has changed meanwhile.
            return waiting
        return {}

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


def _waits(gate: Gate, message: Message, answers: Answers) -> bool:
    try:
        return _is_held(answers, gate.locate(message))
    except RecordError:
        return False


def _is_held(answers: Answers, places: Places) -> bool:
    """Whether a group is known to be behind a record.

    A gate is closed, too, while nothing is known of a group. That says nothing of what
    is left: Kafka has not been asked yet, or does not answer.

    Args:
        answers: how far the groups are.
        places: the record's, in the topics where they are known.
    """
    waits = (
        find_wait(one, answer, places.get(one.topic, Place(0, 0)))
        for one, answer in answers.items()
        # It has committed nothing at all, wherever the record is there.
        if one.topic in places or (answer is not None and not answer.offsets)
    )
    return any(one is not None and one.state != "unknown" for one in waits)
