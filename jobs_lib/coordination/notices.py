"""Tell a listener what a member holds, by a thread that does nothing else."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from jobs_lib import telemetry

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.coordination.messages import Shared


class HoldListener(Protocol):
    """Learns what a member holds. A thread calls it that does nothing else."""

    def taken(self, shared: Shared, position: int | None) -> None:
        """Begin: the partition is held, and its records from a position on are next."""

    def leave(self, shared: Shared) -> None:
        """End soon, and call :meth:`Member.release`."""

    def lost(self, shared: Shared) -> None:
        """Stop: the partition is not held any more, and not claimed before you return.

        Return once nothing of it is processed any more, or let the member's ``is_busy``
        tell that. Nor need you wait if something else guards what is processed, as an
        epoch in a database does.
        """

    def ended(self, error: Exception) -> None:
        """Note that the member has ended for good, and holds nothing."""


class Notices:
    """Calls a listener in order; one that hangs holds up the next notice alone."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"jobs_lib notices {group}", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Call what waits, for some seconds at most, and end."""
        self._waiting.put(None)
        # A listener may stop its member, in this thread.
        if self._thread.ident not in (None, threading.get_ident()):
            self._thread.join(timeout)

    def put(self, tell: Callable[..., None], *values: object) -> None:
        """Call a function with some values soon."""
        self._waiting.put(lambda: tell(*values))

    def _run(self) -> None:
        while (notice := self._waiting.get()) is not None:
            try:
                notice()
            # Its errors are the listener's, SystemExit too: the next notice is told all
            # the same, for nobody would notice a thread that had ended.
            except BaseException as error:
                loop = f"listener {self._group}"
                telemetry.emit("loop.failed", loop=loop, error=error)
