"""A test names the failures that it causes: any other unnoticed failure fails the test.

An event that is missing in the table in `jobs_lib/telemetry.py` fails a test, too. So
does a value of a record or payload (`tests.support.canary.VALUE`) in an event or in the
output of a process. No mark allows these.

`@pytest.mark.expects("loop.failed")` names events of `WATCHED` that this test may emit,
in this process or in those that it starts. Events to which a test listens with `heard`
need no mark.
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
"""Events of trouble that loses nothing, so the results of a test do not show it."""
FENCED = "fenced"
"""In a mark, all that happens to a process after others have taken over its work."""

_LOSES = WATCHED - {"loop.failed"}
_REFUSED = re.compile(r"FencedError|_FENCED|INVALID_PRODUCER_EPOCH")
"""The error that a take-over causes, as a loop names it."""

_LOGGED = re.compile(rf"({'|'.join(map(re.escape, sorted(WATCHED)))}) \w+=")
_STARTING = re.compile("COORDINATOR_LOAD_IN_PROGRESS|NOT_COORDINATOR")
"""A broker says this just after its start on a busy machine: no test causes it."""
_MOST_SHOWN = 5
_TEXTS = (str, BaseException)


class Watch:
    """Notes the watched events that no mark or listener expects."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: Counter[str] = Counter()
        self._found: list[str] = []

    def install(self) -> None:
        """Watch all events that this process emits.

        This is not a listener: the library does less without listeners, and tests
        should run that code, too.
        """
        emit = telemetry.emit

        def watched(event: str, **fields: Any) -> None:
            if event in WATCHED:
                self.note(event, fields)
            if event not in telemetry.EVENTS:
                self._keep(f"the table of events has no {event}")
            # Look at texts only. To make the text of each job for each of its events
            # would cost too much, and the log is watched. An error is compared in the
            # form in which it is logged.
            told = (v for v in fields.values() if issubclass(type(v), _TEXTS))
            if any(VALUE in spell(value) for value in told):
                self._keep(f"{event} holds a value")
            emit(event, **fields)

        telemetry.emit = watched

    def note(self, event: str, fields: dict[str, Any]) -> None:
        """Note an event of this process."""
        # The text of an error may raise by itself.
        told = {
            name: describe(value) if isinstance(value, BaseException) else value
            for name, value in fields.items()
        }
        self._add(event, f"{event} {told}")

    def read(self, lines: Iterable[str]) -> None:
        """Note the events that another process has logged."""
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
        """Allow these events meanwhile."""
        events = (WATCHED | {FENCED}).intersection(events)
        with self._lock:
            self._expected.update(events)
        try:
            yield
        finally:
            with self._lock:
                self._expected.subtract(events)

    def take(self) -> str:
        """Return what was found since the last call, as a message; empty if nothing."""
        with self._lock:
            found, self._found = self._found, []
        shown = found[:_MOST_SHOWN]
        if len(found) > len(shown):
            shown.append(f"and {len(found) - len(shown)} more")
        return "\n".join(shown)


watch = Watch()
"""The watch of this test run."""
