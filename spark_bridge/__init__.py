"""Re-exports on Spark; imports nothing of Spark until one is started."""

from __future__ import annotations

from spark_bridge.engine import SparkEngine, start
from spark_bridge.session import open_session

__all__ = ["SparkEngine", "open_session", "start"]
