"""A signal that a process sends to itself."""

from __future__ import annotations

import signal
import threading


def strike(number: signal.Signals) -> None:
    """Kill or stop this process at this very step of the calling thread.

    A signal to the process may go to another thread, and the caller would run on until
    that one has a processor.
    """
    signal.pthread_kill(threading.get_ident(), number)
