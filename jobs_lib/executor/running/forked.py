"""End a process that a handler forked if it returns into the library."""

from __future__ import annotations

import os
import sys

_forks = 0


def count_forks() -> int:
    """Count the forks between this process and the one that loaded this module."""
    return _forks


def end_if_forked(forks: int) -> None:
    """End this process at once if it was forked since ``forks`` were counted.

    A child that a handler forked has its parent's connections, and would go on as one
    more executor: its messages would be mixed up with the parent's.
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


# Asking for the process's id after each job would cost a twentieth of a quick job.
os.register_at_fork(after_in_child=_note_fork)
