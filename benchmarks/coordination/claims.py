"""Claims: how long one takes, and races of which one claim alone may win."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks.coordination.stage import GROUP, LONG, Figures, Stage, tell
from benchmarks.figures import percentile
from jobs_lib.coordination.messages import (
    ClaimingPartition,
    Heartbeat,
    Probe,
    Sender,
    Shared,
)
from jobs_lib.coordination.world import Outcome

if TYPE_CHECKING:
    from jobs_lib.coordination import Log
    from jobs_lib.coordination.writer import Sent

RACERS = 50
_LOGS = 5
"""Readers and writers, which ten racers share each."""


def measure_latency(stage: Stage) -> Figures:
    """Claim free partitions one by one, until each is held and confirmed."""
    waits: list[float] = []
    with stage.make_reader(stage.make_log(8)) as log:
        for number in range(stage.size(1_000, 50)):
            shared = Shared(GROUP, "claimed", number)
            began = time.perf_counter()
            claim = log.send(ClaimingPartition(log.sender, shared, 10_000))
            claim.wait(LONG)
            assert claim.offset is not None
            beat = log.send(Heartbeat(log.sender, shared, claim.offset, None))
            if beat.wait(LONG) is not Outcome.VALID:
                raise RuntimeError(f"{shared} is not held")
            waits.append(1_000 * (time.perf_counter() - began))
    return {
        "claim_latency_p50_ms": percentile(waits, 0.5),
        "claim_latency_p99_ms": percentile(waits, 0.99),
    }


def measure_races(stage: Stage) -> Figures:
    """Let fifty members claim one partition at once, again and again."""
    races = stage.size(1_000, 20)
    topic = stage.make_log()
    winners: list[int] = []
    with ExitStack() as stack:
        logs = [
            stack.enter_context(stage.make_reader(topic, f"racer-{number}"))
            for number in range(_LOGS)
        ]
        for number in range(races):
            winners.append(_race(logs, Shared(GROUP, "raced", number)))
            if number % 100 == 99:
                tell(f"{number + 1} races")
    return {
        "races": races,
        "race_50_winners": max(winners),
        "race_50_winners_min": min(winners),
    }


def _race(logs: list[Log], shared: Shared) -> int:
    """Return how many have won, as all readers see it."""
    barrier = threading.Barrier(len(logs))
    sent: list[Sent] = []

    def run(log: Log, first: int) -> None:
        barrier.wait()
        for number in range(first, RACERS, len(logs)):
            racer = Sender(GROUP, f"c-{number}", f"i-{number}")
            # The log reads back what its own member has sent. A probe of that member
            # comes behind all of them.
            sent.append(log.send(ClaimingPartition(racer, shared, 10_000)))
        log.send(Probe(log.sender), place=0).wait(LONG)

    threads = [
        threading.Thread(target=run, args=(log, first))
        for first, log in enumerate(logs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.read_to_end(LONG)
    holdings = {log.find(shared).holding for log in logs}
    claims = {one.claim for one in holdings if one is not None}
    first = min(one.offset for one in sent if one.offset is not None)
    if claims != {first}:
        raise RuntimeError(f"the claim at {first} is not the one that holds: {claims}")
    return len({one.instance_id for one in holdings if one is not None})
