"""Members that share partitions over a topic of Kafka, and need no database.

Each name is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib.lazy import import_name

if TYPE_CHECKING:
    from jobs_lib.coordination.consumer import Consumer
    from jobs_lib.coordination.log import Log
    from jobs_lib.coordination.member import Member
    from jobs_lib.coordination.messages import Shared
    from jobs_lib.coordination.notices import HoldListener
    from jobs_lib.coordination.record import Record

__all__ = ["Consumer", "HoldListener", "Log", "Member", "Record", "Shared"]

_MODULES = {
    "Consumer": "consumer",
    "HoldListener": "notices",
    "Log": "log",
    "Member": "member",
    "Record": "record",
    "Shared": "messages",
}


def __getattr__(name: str) -> Any:
    return import_name(__name__, _MODULES, name)
