"""Report which attempts have failed, why, and when the next one comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.executor.lane import Result

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs_lib.executor.lane import Outcome


def report_failures(outcomes: Iterable[Outcome]) -> None:
    """Emit ``job.failed`` for failed attempts whose outcomes are written.

    A job whose payload does not fit its handler is reported, too, though it is only put
    off, and so is one whose handler has found a server away. A failed statement of our
    own is not: the loops report outages.
    """
    for outcome in outcomes:
        if outcome.kind is None:
            continue
        job = outcome.job
        telemetry.emit(
            "job.failed",
            type=job.type,
            id=job.id,
            group=job.group,
            attempt=job.attempt if outcome.ran else job.attempt - 1,
            error=outcome.error,
            outcome=outcome.result.value,
            retry_in=None
            if outcome.result is Result.DISCARDED
            else round(outcome.delay, 3),
            kind=outcome.kind,
            trace=outcome.trace,
        )
