"""Claimed jobs without a claim, for tests of what happens to claimed jobs."""

from __future__ import annotations

from jobs_lib.executor.lane import ClaimedJob, Lane


def make_claimed(
    lane: Lane, job_id: int = 1, payload: str | None = "{}", *, attempt: int = 1
) -> ClaimedJob:
    """Make a job of the type ``work`` in a lane; its group is the lane's."""
    return ClaimedJob(
        id=job_id,
        type="work",
        group=lane.group,
        attempt=attempt,
        crashes=0,
        priority=0,
        payload=payload,
        run_at=None,
        enqueued=0.0,
        headers=None,
        origin=lane.origin,
        installation=lane.installation,
        lane=lane,
    )
