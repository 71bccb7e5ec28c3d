"""Whether this process may publish to a stream now.

A command that adds partitions to a stream first stops all who publish to it, by the
stream's row in the database. To read the row before each event would cost more than the
event. So a thread reads the rows of all streams in use twice a second while events
flow, and an answer counts for `GOOD_SECONDS`. The command waits for longer than that.

A *period* is a time in which no stream of this process can have got more partitions.
What was known of partitions in another period counts no more.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.callers import Pause
from jobs_lib.errors import GrowingError, UnavailableError
from jobs_lib.loop import Loop
from jobs_lib.reasons import find_reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.session import Session
    from jobs_lib.streams.steps import Steps

GOOD_SECONDS = 2.0
"""How long a process may publish after it has begun to ask whether it may."""
_READ_SECONDS = 0.5
_READ_STOPPED_SECONDS = 0.1
_LAST_SECONDS = 1.0
_IDLE_SECONDS = 10.0
"""After so long without an event the thread closes its connection, and waits."""
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.001, 0.05, 1.5


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the database has said of the streams in use."""

    good_until: float = float("-inf")
    """By ``time.monotonic()``, counted from before the question."""
    period: int = 0
    open: frozenset[str] = frozenset()
    stopped: frozenset[str] = frozenset()


class Permits:
    """Knows which streams this process may publish to.

    Args:
        database: has the rows of the streams.
        wait: seconds that a publish waits for a permit.
        seconds: how long an event may take from the permit on until it is in Kafka.
    """

    def __init__(self, database: Database, wait: float, seconds: float) -> None:
        self._database = database
        self._wait = wait
        self._seconds = seconds
        self._lock = threading.Lock()
        self._topics: frozenset[str] = frozenset()
        """Those that were published to."""
        self._answer = _Answer()
        self._used = False
        """Whether somebody has asked for a permit since the last answer."""
        self._failure: BaseException | None = None
        """Why there is no newer answer."""
        self._wanted = threading.Event()
        self._loop: tuple[int, Loop] | None = None

    @property
    def period(self) -> int:
        """The number of the period that the last answer belongs to."""
        return self._answer.period

    def find(self, topic: str) -> int | None:
        """Find the period in which a stream may be published to; None if not now."""
        self._used = True
        answer = self._answer
        if topic in answer.open and time.monotonic() < answer.good_until:
            return answer.period
        return None

    def wait(self, topic: str) -> Steps[int]:
        """Wait until a stream may be published to; returns the period.

        Raises:
            GrowingError: it gets more partitions for longer than a publish may wait.
            UnavailableError: the database does not say whether it may be published to.
        """
        until = time.monotonic() + self._wait
        pause = _FIRST_PAUSE
        while (period := self.find(topic)) is None:
            self._ask(topic)
            if time.monotonic() > until:
                raise self._explain(topic)
            yield Pause(pause)
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)
        return period

    def close(self) -> None:
        """Stop the thread; the next :meth:`wait` starts another one."""
        with self._lock:
            found, self._loop = self._loop, None
        if found is not None and found[0] == os.getpid():
            found[1].stopping.set()
            self._wanted.set()
            # The database may not answer, and nothing is lost.
            found[1].stop(_LAST_SECONDS)

    def _ask(self, topic: str) -> None:
        """Let the thread ask for a stream, if it does not do so already."""
        if topic not in self._topics:
            with self._lock:
                self._topics |= {topic}
            self._wanted.set()
        if self._loop is None or self._loop[0] != os.getpid():
            with self._lock:
                # A fork has no thread of its parent's.
                if self._loop is None or self._loop[0] != os.getpid():
                    self._wanted = threading.Event()
                    loop = Loop("streams", self._work, failed=self._note_failure)
                    self._loop = os.getpid(), loop
                    loop.start()
            self._wanted.set()
        elif time.monotonic() > self._answer.good_until:
            self._wanted.set()

    def _work(self) -> Iterator[None]:
        assert self._loop is not None
        stopping = self._loop[1].stopping
        while not stopping.is_set():
            self._wanted.wait()
            self._wanted.clear()
            with self._database.connect("streams", impatient=True) as connection:
                used_at = time.monotonic()
                while not stopping.is_set():
                    is_used, self._used = self._used, False
                    if is_used:
                        used_at = time.monotonic()
                    elif time.monotonic() > used_at + _IDLE_SECONDS:
                        break
                    self._read(connection)
                    yield
                    stopped = self._answer.stopped
                    self._wanted.wait(
                        _READ_STOPPED_SECONDS if stopped else _READ_SECONDS
                    )
                    self._wanted.clear()

    def _read(self, connection: Session[Any]) -> None:
        topics = self._topics
        queries = self._database.queries
        values = {"topics": sorted(topics), "seconds": self._seconds}
        good_until = time.monotonic() + GOOD_SECONDS
        rows = connection.execute(queries["read_streams"], values).fetchall()
        noted = {topic for topic, is_noted, _ in rows if is_noted}
        if topics - noted:
            connection.execute(queries["note_streams"], values)
            rows = connection.execute(queries["read_streams"], values).fetchall()
        stopped = frozenset(topic for topic, _, is_stopped in rows if is_stopped)
        self._failure = None
        before = self._answer
        # Between two answers that are as far apart as the shortest stop is long, there
        # may have been one.
        is_late = time.monotonic() >= before.good_until + self._seconds
        period = before.period + (is_late or stopped != before.stopped)
        self._answer = _Answer(good_until, period, topics - stopped, stopped)
        for topic in sorted(stopped - before.stopped):
            telemetry.emit("stream.stopped", topic=topic)
        for topic in sorted(before.stopped - stopped):
            telemetry.emit("stream.opened", topic=topic)

    def _note_failure(self, error: BaseException) -> None:
        self._failure = error

    def _explain(self, topic: str) -> Exception:
        if topic in self._answer.stopped and self._failure is None:
            return GrowingError(
                f"the stream {topic!r} gets more partitions, and took no events for "
                f"{self._wait:g} s (JOBS_LIB_PUBLISH_TIMEOUT): nothing was sent. "
                "Publish again later; `jobs-lib topics status MODULE:APP` shows how "
                "far it is"
            )
        reason = "there was no answer yet"
        if self._failure is not None:
            reason = find_reason(self._failure)
        return UnavailableError(
            f"the database has not said within {self._wait:g} s (JOBS_LIB_PUBLISH_"
            f"TIMEOUT) whether the stream {topic!r} may be published to: {reason}. "
            "Nothing was sent"
        )
