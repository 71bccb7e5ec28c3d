"""A test says what it makes fail: anything else that fails unnoticed fails the test.

So does an event that the table in `jobs_lib/telemetry.py` does not have, and a value of
a record or payload (`tests.support.canary.VALUE`) in an event or in what a process has
written; of these no mark frees a test.

`@pytest.mark.expects("loop.failed")` names the events, of those in `WATCHED`, that may
be emitted in this test, by this process or by those that it starts. What a test listens
to with `heard` needs no mark.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.masking import describe, spell
from tests.support.canary import VALUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WATCHED = frozenset({"loop.failed", "jobs.fenced", "origins.lost"})
"""Events that tell of trouble: nobody loses anything, so results look the same."""
FENCED = "fenced"
"""What a mark calls all that befalls a process whose work others have taken over."""

_LOSES = WATCHED - {"loop.failed"}
_REFUSED = re.compile(r"FencedError|_FENCED|INVALID_PRODUCER_EPOCH")
"""How a loop names the error that a take-over makes."""

_LOGGED = re.compile(rf"({'|'.join(map(re.escape, sorted(WATCHED)))}) \w+=")
_STARTING = re.compile("COORDINATOR_LOAD_IN_PROGRESS|NOT_COORDINATOR")
"""What a broker says that has just been started, on a busy machine: no test's doing."""
_MOST_SHOWN = 5
_TEXTS = (str, BaseException)


class Watch:
    """Notes the watched events that no mark or listener expects."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: Counter[str] = Counter()
        self._found: list[str] = []

    def install(self) -> None:
        """See all that this process emits.

        Not as a listener: the library does less where nobody listens, and tests shall
        run that code too.
        """
        emit = telemetry.emit

        def watched(event: str, **fields: Any) -> None:
            if event in WATCHED:
                self.note(event, fields)
            if event not in telemetry.EVENTS:
                self._keep(f"the table of events has no {event}")
            # Texts alone: a job's own would be made for each event of each job, and the
            # log is watched. An error is looked at as it is told.
            told = (v for v in fields.values() if issubclass(type(v), _TEXTS))
            if any(VALUE in spell(value) for value in told):
                self._keep(f"{event} holds a value")
            emit(event, **fields)

        telemetry.emit = watched

    def note(self, event: str, fields: dict[str, Any]) -> None:
        """An event of this process."""
        # An error's own text may raise.
        told = {
            name: describe(value) if isinstance(value, BaseException) else value
            for name, value in fields.items()
        }
        self._add(event, f"{event} {told}")

    def read(self, lines: Iterable[str]) -> None:
        """What another process has logged."""
        for line in lines:
            if VALUE in line:
                self._keep(f"a process has written a value: {line}")
            if match := _LOGGED.search(line):
                self._add(match[1], line)

    def _add(self, event: str, text: str) -> None:
        if _STARTING.search(text):
            return
        was_fenced = event in _LOSES or _REFUSED.search(text)
        with self._lock:
            if self._expected[event] or (was_fenced and self._expected[FENCED]):
                return
            self._found.append(text)

    def _keep(self, text: str) -> None:
        with self._lock:
            self._found.append(text)

    @contextmanager
    def expecting(self, events: Iterable[str]) -> Iterator[None]:
        """These may be emitted meanwhile."""
        events = (WATCHED | {FENCED}).intersection(events)
        with self._lock:
            self._expected.update(events)
        try:
            yield
        finally:
            with self._lock:
                self._expected.subtract(events)

    def take(self) -> str:
        """What was found since the last call, for a message; empty for nothing."""
        with self._lock:
            found, self._found = self._found, []
        shown = found[:_MOST_SHOWN]
        if len(found) > len(shown):
            shown.append(f"and {len(found) - len(shown)} more")
        return "\n".join(shown)


watch = Watch()
"""Of this test run."""
