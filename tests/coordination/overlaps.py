"""Judges when the batches of a run were processed, beside those of other holders.

The journal of a process says when its handler began and ended, by the machine's clock
of elapsed time, and which positions it has told, in the order in which it did so. The
log has the times of the broker, which runs on the same machine.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from jobs_lib.coordination.patience import read_clock
from tests.coordination.checker import name_partition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.coordination.checker import Batch, History, Holding, Run

_SLACK_MS = 20.0
"""That a broker's clock, of whole milliseconds, may seem to be off."""


@dataclass(frozen=True)
class Clocks:
    """How the times of journals compare with those of the log."""

    shift_ms: float
    """From a time of a journal to the same one of the log."""
    slack_ms: float
    """By how much that may be wrong."""


def read_shift() -> float:
    """Read how far the machine's time of day is ahead of its clock of elapsed time."""
    return (time.time() - read_clock()) * 1_000


def compare_clocks(before: float) -> Clocks:
    """Compare the clocks of a run, with what `read_shift` gave when it began."""
    after = read_shift()
    return Clocks((before + after) / 2, _SLACK_MS + abs(after - before))


def judge_times(
    history: History, runs: Iterable[Run], topic: str, clocks: Clocks
) -> list[str]:
    """Name what breaks the stated time in which two holders may overlap.

    A process is sure of a partition for less than one interval since its last valid
    record. It may stand still behind that question, once. So between two such records,
    and behind the last one, it begins at most one batch later than an interval after
    the former. And at most one batch of it ends beside its successor.

    What a heartbeat tells counts all batches that were processed before it was sent,
    but for the one whose end is noted just then. So a successor repeats no other ones
    than those of the time since the last heartbeat.

    Args:
        history: what the log says.
        runs: all processes.
        topic: the one that they have read.
        clocks: see `compare_clocks`.
    """
    faults: list[str] = []
    for run in runs:
        faults += _judge_told(run)
        late: Counter[tuple[int, int, int]] = Counter()
        beside: Counter[tuple[int, int]] = Counter()
        for batch, holding, successor in _find_holdings(history, run, topic):
            if batch.begun_ms is None or batch.done_ms is None:
                continue
            begun = batch.begun_ms + clocks.shift_ms
            done = batch.done_ms + clocks.shift_ms
            # A record that came just before it may seem to come just behind it.
            before = bisect_right(holding.kept_ms, begun + clocks.slack_ms)
            # Nobody begins before the first heartbeat was read back.
            kept = holding.kept_ms[max(0, before - 1)]
            if begun - kept - clocks.slack_ms >= holding.interval_ms:
                late[batch.partition, batch.claim, before] += 1
            ended = done - clocks.slack_ms
            if successor is not None and ended > successor.claimed_ms:
                beside[batch.partition, batch.claim] += 1
        faults += [
            f"{run.client_id} began {count} batches of {one[0]} by the claim {one[1]} "
            "more than an interval after the same record"
            for one, count in late.items()
            if count > 1
        ]
        faults += [
            f"{run.client_id} processed {count} batches of {one[0]} by the claim "
            f"{one[1]} beside its successor"
            for one, count in beside.items()
            if count > 1
        ]
    return faults


def _judge_told(run: Run) -> list[str]:
    """Name the positions that were told, and are those of batches long before."""
    if run.may_repeat:
        return []
    return [
        f"{run.client_id} tells {told.position} of {told.partition}, and has processed "
        f"it to {batch.end}"
        for told in run.told
        for batch in run.batches[: max(0, told.done - 1)]
        if (batch.partition, batch.claim) == (told.partition, told.claim)
        and batch.end > told.position
    ]


def _find_holdings(
    history: History, run: Run, topic: str
) -> Iterator[tuple[Batch, Holding, Holding | None]]:
    """Find the holding of each batch, and the one after that."""
    after = {
        (shared, one.claim): following
        for shared, holdings in history.holdings.items()
        for one, following in pairwise(holdings)
    }
    for batch in run.batches:
        shared = name_partition(history, topic, batch)
        holding = history.find(run, shared, batch.claim)
        if holding is not None and holding.kept_ms:
            yield batch, holding, after.get((shared, batch.claim))
