"""What an operator does with groups that share partitions over a coordination log.

Nothing here needs a database, or loads a driver of one.
"""

from __future__ import annotations

from jobs_lib.operating.coordination.logs import Fault, create_log, find_log_faults
from jobs_lib.operating.coordination.pauses import (
    Paused,
    Released,
    pause,
    release,
    resume,
)
from jobs_lib.operating.coordination.positions import Moved, set_position
from jobs_lib.operating.coordination.session import Holder
from jobs_lib.operating.coordination.view import GroupPause, SharedPart, View, Viewer

__all__ = [
    "Fault",
    "GroupPause",
    "Holder",
    "Moved",
    "Paused",
    "Released",
    "SharedPart",
    "View",
    "Viewer",
    "create_log",
    "find_log_faults",
    "pause",
    "release",
    "resume",
    "set_position",
]
