"""Handle signals in a thread, where locks may be taken.

Python calls a signal's handler in the main thread, between any two of its steps. If the
main thread holds a lock just then, and the handler waits for it, both wait for ever. A
`threading.Event` has such a lock, and whoever waits for one holds it now and then.
"""

from __future__ import annotations

import signal
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from jobs_lib import telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def handle_signals(
    numbers: Iterable[int], handle: Callable[[int], object]
) -> Callable[[], None]:
    """Call a function for each of these signals that comes, in a thread of its own.

    Call this in the main thread.

    Args:
        numbers: of the signals.
        handle: called with the number, for one signal after the other.

    Returns a function that lets the signals be handled as before.
    """
    # Its `put` may be called amid any other call of it: it takes no lock.
    arrived: SimpleQueue[int | None] = SimpleQueue()
    before = [
        (number, signal.signal(number, lambda number, _: arrived.put(number)))
        for number in numbers
    ]

    def serve() -> None:
        while (number := arrived.get()) is not None:
            try:
                handle(number)
            # The next signal must be heard.
            except Exception:
                telemetry.logger.exception("a signal's handler has failed")

    def restore() -> None:
        for number, handler in before:
            signal.signal(number, handler)
        arrived.put(None)

    if before:
        threading.Thread(target=serve, name="jobs_lib signals", daemon=True).start()
    return restore
