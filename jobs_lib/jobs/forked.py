"""A handler's fork that comes back into the library ends there."""

from __future__ import annotations

import os
import sys


def end_if_forked(pid: int) -> None:
    """End this process, at once, if it is not the one of that number.

    A child that a handler forked has the connections of its parent, and would go on as
    one more executor: what it sends garbles what the parent sends.
    """
    if os.getpid() != pid:
        sys.stderr.write(
            "jobs_lib: a process that a handler forked came back from the handler; it "
            "ends here, with code 70. Let it call os._exit, or use subprocess\n"
        )
        sys.stderr.flush()
        os._exit(os.EX_SOFTWARE)
