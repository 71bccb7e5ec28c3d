"""Check the coordination log, if the settings name one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.operating.checks.finding import Finding
from jobs_lib.operating.coordination.logs import find_log_faults

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.operating.checks.finding import Target


def check_log(target: Target) -> Iterator[Finding]:
    """Check that the coordination log keeps what is written to it."""
    settings = target.settings
    log = settings.coordination_topic
    if not log or not settings.kafka_bootstrap_servers:
        return
    for fault in find_log_faults(settings, log, settings.coordination_interval):
        yield Finding(fault.level, "coordination log", fault.what, fault.way_out)
