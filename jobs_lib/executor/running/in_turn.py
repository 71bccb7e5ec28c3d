"""Lend transactions to the items of one call so that a group commits in its order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from jobs_lib.errors import OutOfTurnError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jobs_lib.executor.lane import ClaimedJob
    from jobs_lib.executor.running.transaction import OwnTransaction

    Lend = Callable[[ClaimedJob], OwnTransaction]


def lend_in_turn(jobs: Iterable[ClaimedJob], lend: Lend) -> None:
    """Let jobs of one call have their transactions, those of a group one by one.

    How an item ends is decided only when the call has ended. So a job of a group may
    commit only behind those that have committed: any other may still fail, and would
    then run again behind it.

    Args:
        jobs: of one call, in their order.
        lend: makes the transaction of a job.
    """
    ahead: dict[int, ClaimedJob] = {}
    for job in jobs:
        before = ahead.get(id(job.lane))
        job.lend = lend if before is None else partial(_lend_behind, before, lend)
        if job.group is not None:
            ahead[id(job.lane)] = job


def _lend_behind(before: ClaimedJob, lend: Lend, job: ClaimedJob) -> OwnTransaction:
    if before.completed:
        return lend(job)
    # The handler may ask again, once the other has committed.
    job.lend = partial(_lend_behind, before, lend)
    raise OutOfTurnError(
        f"job {job.id} of {job.type!r} asks for its transaction before job {before.id} "
        "ahead of it in its group has committed. Take the items of a group in their "
        "order, and once one of them fails or ends without a transaction, leave the "
        "others of its group: they run later, without another attempt"
    )
