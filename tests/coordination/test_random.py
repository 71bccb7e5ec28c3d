"""Random faults for a while; a checker then judges the run from the topic alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from jobs_lib.coordination.messages import Shared
from tests.coordination.fleet import (
    BATCH,
    BOTH,
    GROUP,
    INTERVAL,
    SECONDS,
    Feed,
    Fleet,
    judge,
    read_time,
)

if TYPE_CHECKING:
    from pathlib import Path

WAIT = 120.0


@pytest.fixture
def disturb(
    log_topic, topic, open_log, run_process, bootstrap_servers, wait_for, tmp_path: Path
):
    """A function that disturbs members, and judges what they did."""

    def run(delivery: str, members: int, partitions: int, seconds: float) -> None:
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        chance = random.Random(seed)
        log_name, data = log_topic(3), topic(partitions)
        watching = open_log(log_name, "watch", only_reads=True)
        given = {
            "servers": bootstrap_servers,
            "log": log_name,
            "group": GROUP,
            "topics": [data],
            "interval": INTERVAL,
            "delivery": delivery,
            "batch": BATCH,
            "seconds": SECONDS,
        }
        fleet = Fleet(run_process, chance, tmp_path, given)
        for number in range(members):
            fleet.start(f"m-{number}")
        shared = [Shared(GROUP, data, number) for number in range(partitions)]
        wait_for(
            lambda: all(watching.find(one).holding for one in shared),
            timeout=WAIT,
            what=lambda: f"all are held\n{fleet.describe()}",
        )
        with Feed(bootstrap_servers, data, partitions, random.Random(seed)) as feed:
            until = read_time(watching) + seconds * 1_000
            while (now := read_time(watching)) < until:
                fleet.disturb()
                rest = now + chance.uniform(0.1, 4) * INTERVAL * 1_000
                wait_for(
                    lambda after=rest: read_time(watching) > after,
                    timeout=WAIT,
                    what=lambda: f"time passes in the log\n{fleet.describe()}",
                )
            fleet.restore()
            feed.stop()
        ends = {number: feed.counts[number] for number in range(partitions)}
        wait_for(
            lambda: (
                [watching.find(one).position or 0 for one in shared] == [*ends.values()]
            ),
            timeout=WAIT,
            what=lambda: f"all are processed, seed {seed}\n{fleet.describe()}",
        )
        fleet.end()
        faults = judge(
            bootstrap_servers, log_name, delivery, fleet.list_runs(), data, ends
        )
        assert not faults, "\n".join([f"seed {seed}", *faults, fleet.describe()])

    return run


@pytest.mark.guarantee("M22", "M14", "I31", "I32")
@pytest.mark.expects("loop.failed")
@BOTH
def test_random_faults_leave_one_holder_and_the_stated_delivery(disturb, delivery):
    disturb(delivery, members=4, partitions=8, seconds=6)


@pytest.mark.guarantee("M22", "M16", "I31", "I32")
@pytest.mark.expects("loop.failed")
@pytest.mark.slow
@pytest.mark.timeout(900)
@BOTH
def test_five_minutes_of_random_faults_leave_one_holder_and_the_stated_delivery(
    disturb, delivery
):
    # With both deliveries it is five minutes.
    disturb(delivery, members=7, partitions=24, seconds=150)
