"""A worker whose handler notes its start and end, to find overlaps."""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING, Any

from jobs_lib.service.service import Service

if TYPE_CHECKING:
    from jobs_lib import App, Job

EVENT = struct.Struct("<Bqq")
"""Whether it is a start, the tenant's number, nanoseconds of ``time.monotonic``."""
TENANTS = 50
_SLOW = 20
"""One of this many jobs waits, as if for an outside service."""
_SECONDS = 0.002


def declare(app: App, limit: Any, log: str | None = None) -> Any:
    """Declare the type of these jobs; without a log they are only enqueued."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if log else -1

    @app.job(limit=limit)
    def limited(job: Job, i: int, tenant: int) -> None:
        os.write(file, EVENT.pack(1, tenant, time.monotonic_ns()))
        if i % _SLOW == 0:
            time.sleep(_SECONDS)
        os.write(file, EVENT.pack(0, tenant, time.monotonic_ns()))

    return limited


def work(app: App, limit: Any, log: str) -> None:
    """Run these jobs until the process is ended."""
    declare(app, limit, log)
    Service(app, ["executor"]).run()
