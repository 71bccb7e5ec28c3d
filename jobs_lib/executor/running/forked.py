"""A handler's fork that comes back into the library ends there."""

from __future__ import annotations

import os
import sys

_forks = 0


def count_forks() -> int:
    """How many forks lie between this process and the one that loaded this module."""
    return _forks


def end_if_forked(forks: int) -> None:
    """End this process, at once, if it was forked off since there were so many.

    A child that a handler forked has the connections of its parent, and would go on as
    one more executor: what it sends garbles what the parent sends.
    """
    if _forks != forks:
        sys.stderr.write(
            "jobs_lib: a process that a handler forked came back from the handler; it "
            "ends here, with code 70. Let it call os._exit, or use subprocess\n"
        )
        sys.stderr.flush()
        os._exit(os.EX_SOFTWARE)


def _note_fork() -> None:
    global _forks
    _forks += 1


# To ask for the process's number after each job costs a twentieth of a quick one.
os.register_at_fork(after_in_child=_note_fork)
