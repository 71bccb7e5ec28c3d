"""The time of each step between a hint and a handler, noted inside the worker."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from jobs_lib.executor.running.workers import WorkerPool
from jobs_lib.postgres.session import Session
from jobs_lib.postgres.wakeup import Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = ("hinted", "sent", "answered", "put", "started")
"""The hint is read, the claim is sent, answered and read, and the handler runs."""
_DISPATCHER = "jobs_lib executor"


class Steps:
    """A sink that writes the times of all steps of each job, for one job at a time."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._at = dict.fromkeys(STEPS, 0)
        self._watch(Wakeup, "_take_hints", after="hinted")
        self._watch(Session, "wait", before="sent", after="answered")
        self._watch(WorkerPool, "put", before="put")

    def note(self, number: int, group: str | None = None) -> None:
        """Note the first line of the handler."""
        self._at["started"] = time.monotonic_ns()
        times = " ".join(str(self._at[step]) for step in STEPS)
        os.write(self._file, f"{number} {times}\n".encode())

    def _watch(
        self, owner: type, name: str, before: str | None = None, after: str = ""
    ) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if threading.current_thread().name != _DISPATCHER:
                return method(*args, **options)
            if before:
                self._at[before] = time.monotonic_ns()
            result = method(*args, **options)
            if after:
                self._at[after] = time.monotonic_ns()
            return result

        setattr(owner, name, watched)
