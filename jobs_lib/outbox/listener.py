"""Hear the hints of new rows, for all threads of a relay.

No relay thread listens itself: while it waits for a broker or for a loader of the
application, it would hear nothing, and the rows of all other threads would wait, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.loop import Loop
from jobs_lib.postgres.wakeup import Wakeup

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from jobs_lib.postgres.database import Database
    from jobs_lib.telemetry.liveness import Pulse

_LONGEST = 1.0
"""Seconds of one sleep while hints can come: each is a sign of life."""
_RETRY = 0.1
"""Seconds between two looks whether it is time to connect again."""


class Listener:
    """A thread that listens; it does not run where no session can.

    Args:
        database: sends the hints.
        heard: called after hints, and when hints begin or cease to come.
        stopping: set when the thread is to end.
    """

    def __init__(
        self, database: Database, heard: Callable[[], None], stopping: threading.Event
    ) -> None:
        self._heard = heard
        self._stopping = stopping
        self._listens = database.listens
        channel = database.outbox_channel if self._listens else None
        self._wakeup = Wakeup(database, channel)
        self._loop = Loop(
            "relay hints", self._listen, stopping=stopping, ended=self._wakeup.close
        )

    @property
    def pulses(self) -> list[Pulse]:
        """The pulse of its thread, if it has one."""
        return [self._loop.pulse] if self._listens else []

    @property
    def receives_hints(self) -> bool:
        """Whether hints can arrive now; callable from any thread."""
        return self._wakeup.receives_hints

    def start(self) -> None:
        """Start the thread."""
        if self._listens:
            self._loop.start()

    def stop(self) -> None:
        """Wait until the thread has ended. Call after ``stopping`` is set."""
        if self._listens:
            self._wakeup.set()
            self._loop.stop()
        else:
            self._wakeup.close()

    def _listen(self) -> Iterator[None]:
        turns = 0
        while not self._stopping.is_set():
            hints = self._wakeup.wait(_LONGEST if self.receives_hints else _RETRY)
            # Hints sent while nothing listened are lost, and the pace of polls changes
            # when listening begins or ends.
            if hints or self._wakeup.turns != turns:
                turns = self._wakeup.turns
                self._heard()
            yield
