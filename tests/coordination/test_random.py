"""Random faults for a while; a checker then judges the run from the topic alone."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from jobs_lib.coordination.messages import Shared
from tests.coordination.checker import find_lost_claims, replay
from tests.coordination.fleet import (
    BATCH,
    BOTH,
    GROUP,
    INTERVAL,
    SECONDS,
    Feed,
    Fleet,
    ask_for_states,
    judge,
    read_states,
    read_time,
)
from tests.coordination.journals import read_log, read_run
from tests.coordination.overlaps import compare_clocks, read_shift
from tests.support.clock import (
    HAS_FAKETIME,
    NEEDS_FAKETIME,
    faketime_by,
    set_faketime,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs_lib.settings import Settings
    from tests.support.worker import Worker

WAIT = 120.0


def are_states_told(settings: Settings, log: str) -> bool:
    """Whether several members have written their states of each place of a log."""
    ask_for_states(settings, log)
    places = read_log(settings.kafka_bootstrap_servers, log)
    told = {place for (place, _), one in read_states(places).items() if len(one) > 1}
    return told == places.keys()


@pytest.fixture
def disturb(
    settings,
    log_topic,
    topic,
    open_log,
    run_process,
    bootstrap_servers,
    wait_for,
    tmp_path: Path,
):
    """A function that disturbs members, and judges what they did."""

    def run(
        delivery: str,
        members: int,
        partitions: int,
        seconds: float,
        find_env: Callable[[Path], dict[str, str]] | None = None,
    ) -> None:
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
        shift = read_shift()
        fleet = Fleet(run_process, chance, tmp_path, given, find_env or (lambda _: {}))
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
                if find_env is not None:
                    fleet.shift()
                rest = now + chance.uniform(0.1, 4) * INTERVAL * 1_000
                wait_for(
                    lambda after=rest: read_time(watching) > after,
                    timeout=WAIT,
                    what=lambda: f"time passes in the log\n{fleet.describe()}",
                )
            fleet.restore()
            feed.stop()
        ends = {number: feed.counts[number] for number in range(partitions)}

        def find_left() -> dict[int, int]:
            at = {one.partition: watching.find(one).position or 0 for one in shared}
            return {n: end - at[n] for n, end in ends.items() if end != at[n]}

        # A busy machine is slow, and what was fed meanwhile is much.
        while left := find_left():
            wait_for(
                lambda before=left: find_left() != before,
                timeout=WAIT,
                what=lambda: f"{find_left()} go on, seed {seed}\n{fleet.describe()}",
            )
        wait_for(
            lambda: are_states_told(settings, log_name),
            timeout=WAIT,
            every=1.0,
            what=lambda: f"members state their worlds\n{fleet.describe()}",
        )
        fleet.end()
        faults = judge(
            bootstrap_servers,
            log_name,
            delivery,
            fleet.list_runs(),
            data,
            ends,
            compare_clocks(shift),
            needs_states=True,
        )
        assert not faults, "\n".join([f"seed {seed}", *faults, fleet.describe()])

    return run


@pytest.mark.guarantee("M22", "M14", "I31", "I32")
@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize(
    "delivery",
    [pytest.param("at_least_once", marks=pytest.mark.slow), "at_most_once"],
)
def test_random_faults_leave_one_holder_and_the_stated_delivery(disturb, delivery):
    disturb(delivery, members=4, partitions=8, seconds=6)


@pytest.mark.guarantee("M16", "M18", "I31", "I32")
@pytest.mark.expects("loop.failed")
@pytest.mark.slow
@pytest.mark.timeout(900)
@BOTH
def test_five_minutes_of_random_faults_leave_one_holder_and_the_stated_delivery(
    disturb, delivery
):
    disturb(
        delivery,
        members=7,
        partitions=24,
        seconds=300,
        find_env=faketime_by if HAS_FAKETIME else None,
    )


@pytest.mark.guarantee("M22", "I31")
@pytest.mark.expects("loop.failed")
@pytest.mark.slow
@pytest.mark.timeout(600)
@NEEDS_FAKETIME
@BOTH
def test_wrong_clocks_that_leap_leave_one_holder_and_the_stated_delivery(
    disturb, delivery
):
    disturb(delivery, members=4, partitions=8, seconds=30, find_env=faketime_by)


@pytest.mark.guarantee("I40")
@pytest.mark.slow
@NEEDS_FAKETIME
def test_a_member_that_judges_by_its_own_clock_is_found(
    log_topic, topic, run_process, bootstrap_servers, wait_for, tmp_path: Path
):
    log, data = log_topic(1), topic(4)
    given = {
        "servers": bootstrap_servers,
        "log": log,
        "group": GROUP,
        "topics": [data],
        "interval": INTERVAL,
    }

    def start(name: str, shift: int, **more: bool) -> Worker:
        set_faketime(tmp_path / name, shift)
        return run_process(
            "-m",
            "tests.support.coordinated",
            json.dumps(given | {"client_id": name} | more),
            env=faketime_by(tmp_path / name),
        )

    def find_faults() -> list[str]:
        runs = [read_run(right, "right"), read_run(wrong, "wrong")]
        return find_lost_claims(replay(read_log(bootstrap_servers, log)), runs, data)

    with Feed(bootstrap_servers, data, 4, random.Random(1)):
        right = start("right", 0)
        right.wait_for_line("handled", timeout=WAIT)
        # To this one, the other has been silent for an hour.
        wrong = start("wrong", 3_600, judges_by_its_own_clock=True)
        faults = wait_for(
            find_faults,
            timeout=WAIT,
            every=1.0,
            what=lambda: f"it is found\n{right.output}\n{wrong.output}",
        )
    assert all("wrong processed Batch" in one for one in faults)
