"""The executor: claim for the owned origins, run, and settle in batches."""

from __future__ import annotations

__all__ = ["Executor"]

from jobs_lib.executor.executor import Executor
