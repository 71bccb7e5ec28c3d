"""Hear the hints of new rows, for all threads of a relay.

No relay thread listens itself: while it waits for a broker or for a loader of the
application, it would hear nothing, and the rows of all other threads would wait, too.

A hint names a shard, whose thread looks at once. The others look a while later: the
hint of another row may have been left out, or may wait for the end of its transaction.
"""

from __future__ import annotations

import math
import time
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
_DIGITS = 4
"""Of the largest shard. Everybody may send a NOTIFY, with any text."""
_RETRY = 0.1
"""Seconds between two looks whether it is time to connect again."""


class Listener:
    """A thread that listens; it does not run where no session can.

    Args:
        database: sends the hints.
        heard: called after hints, and when hints begin or cease to come, with the
            shards that may have rows; None for all.
        rest: seconds after which a hint for one shard counts for all.
        stopping: set when the thread is to end.
    """

    def __init__(
        self,
        database: Database,
        heard: Callable[[frozenset[int] | None], None],
        rest: float,
        stopping: threading.Event,
    ) -> None:
        self._heard = heard
        self._rest = rest
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
        turns, due = 0, math.inf
        while not self._stopping.is_set():
            longest = _LONGEST if self.receives_hints else _RETRY
            hints = self._wakeup.wait(min(longest, due - time.monotonic()))
            # Hints sent while nothing listened are lost, and the pace of polls changes
            # when listening begins or ends.
            turned, turns = self._wakeup.turns != turns, self._wakeup.turns
            now = time.monotonic()
            if turned or now >= due or not all(map(_names_shard, hints)):
                due = math.inf
                self._heard(None)
            elif hints:
                due = min(due, now + self._rest)
                self._heard(frozenset(map(int, hints)))
            yield


def _names_shard(hint: str) -> bool:
    return hint.isdecimal() and len(hint) <= _DIGITS
