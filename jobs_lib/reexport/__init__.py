"""Re-export an entity: send its current states again, at a rate, resumable anywhere.

    start ─▶ ranges in a table ─▶ engine: one transaction a range ─▶ chunk jobs
          ─▶ executor: chunk_handler ─▶ id-only outbox rows ─▶ relay, at the rate

A range is loaded exactly once, and a chunk job's rows are written exactly once. The
relay sends them at least once, as it sends everything.
"""

from __future__ import annotations

from jobs_lib.reexport.chunks import CHUNK_TYPE, chunk_handler
from jobs_lib.reexport.control import (
    Progress,
    cancel,
    finish_if_done,
    pause,
    resume,
    set_rate,
    status,
)
from jobs_lib.reexport.loading import Loading, SqlEngine, load_range
from jobs_lib.reexport.plan import Plan, Range, plan_ranges
from jobs_lib.reexport.run import Begun, Engine, begin, load, start
from jobs_lib.reexport.source import Source

__all__ = [
    "CHUNK_TYPE",
    "Begun",
    "Engine",
    "Loading",
    "Plan",
    "Progress",
    "Range",
    "Source",
    "SqlEngine",
    "begin",
    "cancel",
    "chunk_handler",
    "finish_if_done",
    "load",
    "load_range",
    "pause",
    "plan_ranges",
    "resume",
    "set_rate",
    "start",
    "status",
]
