"""Re-exports on Spark; imports nothing of Spark until one is started."""

from __future__ import annotations

from jobs_lib.reexport import LagLimit, Window, parse_window
from jobs_lib.reexport.move import end_move
from spark_bridge.engine import SparkEngine, examine, start
from spark_bridge.frames import FrameSource
from spark_bridge.repairs import start_move, start_rebuild, start_stale
from spark_bridge.session import open_session

__all__ = [
    "FrameSource",
    "LagLimit",
    "SparkEngine",
    "Window",
    "end_move",
    "examine",
    "open_session",
    "parse_window",
    "start",
    "start_move",
    "start_rebuild",
    "start_stale",
]
