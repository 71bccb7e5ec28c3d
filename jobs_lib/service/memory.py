"""How a process that runs for long keeps its memory: what Python and C make of it."""

from __future__ import annotations

import ctypes
import gc

_COLLECT = 100_000, 10, 10
"""Objects that wait for the garbage collector: twenty blocks' rows."""
_MXFAST = 1
"""Of `mallopt` (mallopt(3)): up to which size freed memory is kept apart."""


def tune_memory() -> None:
    """Prepare for many small things that come and go; call it when all has started."""
    # What is there by now stays, and rows that are read make no cycles: the garbage
    # collector would go through all of it with every few hundred of them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT)
    # A record's dozen small pieces are freed together. glibc would keep each apart, and
    # join them all when something large is asked for: a tenth of what a relay computes.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MXFAST, 0)
