"""Re-export an entity: send its current states again, at a rate, resumable anywhere.

    start ─▶ ranges in a table ─▶ engine: one transaction a range ─▶ chunk jobs
          ─▶ executor: chunk_handler ─▶ id-only outbox rows ─▶ relay, at the rate

A range is loaded exactly once, and a chunk job's rows are written exactly once. The
relay sends them at least once, as it sends everything.
"""

from __future__ import annotations

from jobs_lib.outbox.finishing import finish_if_done
from jobs_lib.reexport.changes import give_changes
from jobs_lib.reexport.chunks import CHUNK_TYPE, chunk_handler
from jobs_lib.reexport.control import (
    LagLimit,
    Progress,
    cancel,
    list_latest,
    parse_lag_limit,
    pause,
    resume,
    set_rate,
    status,
    watch_lag,
)
from jobs_lib.reexport.loading import Loading, SqlEngine, load_range
from jobs_lib.reexport.plan import Plan, Range, plan_ranges
from jobs_lib.reexport.run import Begun, Engine, begin, load, start
from jobs_lib.reexport.source import Source
from jobs_lib.reexport.stale import Finder, SqlFinder, Stale, check_topic, remove_stale
from jobs_lib.reexport.window import Span, Window, find_rate, find_span, parse_window

__all__ = [
    "CHUNK_TYPE",
    "Begun",
    "Engine",
    "Finder",
    "LagLimit",
    "Loading",
    "Plan",
    "Progress",
    "Range",
    "Source",
    "Span",
    "SqlEngine",
    "SqlFinder",
    "Stale",
    "Window",
    "begin",
    "cancel",
    "check_topic",
    "chunk_handler",
    "find_rate",
    "find_span",
    "finish_if_done",
    "give_changes",
    "list_latest",
    "load",
    "load_range",
    "parse_lag_limit",
    "parse_window",
    "pause",
    "plan_ranges",
    "remove_stale",
    "resume",
    "set_rate",
    "start",
    "status",
    "watch_lag",
]
