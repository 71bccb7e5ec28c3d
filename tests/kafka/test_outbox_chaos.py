"""The topics are right through many faults of relays and servers.

CHAOS_SECONDS=1800 sets how long the slow runs take, and CHAOS_SEED=7 repeats a run.
"""

from __future__ import annotations

import os
import random
import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.outbox.relay import SENDERS
from jobs_lib.testing.databases import Databases, embedded_server
from tests.support.outbox.judge import find_missing
from tests.support.outbox.stage import Stage
from tests.support.outbox.writers import Writers
from tests.support.waiting import linger, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.outbox.judge import Verdict

PARTITIONS = 4
CALM = {"stale_after": 60.0, "session_timeout": 60.0}
"""Of relays that no fault is to hit: a busy machine may stand still for seconds, which
would be one."""
SECONDS = {"relays": 300.0, "all": 1800.0}
GIVEN = os.environ.get("CHAOS_SECONDS")


@pytest.fixture
def server():
    """A PostgreSQL server that may be killed."""
    with embedded_server() as server:
        yield server


@pytest.fixture
def stage(server, own_broker, run_process):
    """A stage with servers that may both be killed."""
    # The broker's clock, which is that of the machine, stamps each record's arrival.
    config = {"message.timestamp.type": "LogAppendTime"}
    with Databases(server.url) as databases, databases.fresh() as url:
        stage = Stage(
            url,
            own_broker.bootstrap_servers,
            own_broker.create(PARTITIONS, config),
            own_broker.create(PARTITIONS, config),
            run_process,
            partitions=PARTITIONS,
            stale_after=1.5,
            heartbeat_interval=0.3,
            session_timeout=4.0,
        )
        try:
            yield stage
        finally:
            stage.close()


class Faults:
    """The faults of a stage's relays; one relay is behind the proxy."""

    def __init__(self, stage: Stage, server, broker, pods: int) -> None:
        self.stage, self.server, self.broker = stage, server, broker
        self.pods = [f"r{n}" for n in range(pods)]

    def start_relays(self, **settings: Any) -> None:
        """Start the relays with these settings; those that run are stopped before."""
        self.stage.stop_relays()
        proxied = self.broker.proxied
        self.stage.start_relay("r0", kafka_bootstrap_servers=proxied, **settings)
        for pod in self.pods[1:]:
            self.stage.start_relay(pod, **settings)
        self.stage.await_owners(*self.pods)

    def of_relays(self, chance: random.Random) -> dict[str, Callable[[], None]]:
        """Return the faults that can hit a relay."""
        pod = chance.choice(self.pods)
        return {
            "kills": partial(self.stage.kill_at_once, pod),
            "kills after the send": partial(self.stage.kill_after_send, pod),
            "pauses": partial(self.stage.pause, pod),
        }

    def of_all(self, chance: random.Random) -> dict[str, Callable[[], None]]:
        """Return the same faults, and those of servers and networks."""
        seconds = chance.uniform(0, 4)
        return self.of_relays(chance) | {
            "kills of the database": partial(self.kill_database, seconds),
            "kills of the broker": partial(self.kill_broker, seconds),
            "cuts": self.cut,
            "silences": partial(self.silence, seconds),
        }

    def kill_database(self, seconds: float) -> None:
        """SIGKILL PostgreSQL, and start it again."""
        self.stage.explain("kills of the database", SENDERS * len(self.pods))
        self.server.kill()
        linger(seconds)
        self.server.start()

    def kill_broker(self, seconds: float) -> None:
        """SIGKILL the broker, and start it again."""
        self.stage.explain("kills of the broker", SENDERS * len(self.pods))
        with self.broker.down():
            linger(seconds)

    def cut(self) -> None:
        """Reset the connections between a relay and the broker."""
        self.stage.explain("cuts", SENDERS)
        self.broker.proxy.reset()

    def silence(self, seconds: float) -> None:
        """Hold the bytes between a relay and the broker back, and deliver them late."""
        self.stage.explain("silences", SENDERS)
        self.broker.proxy.freeze()
        linger(seconds)
        self.broker.proxy.thaw()


def assert_right(stage: Stage, verdict: Verdict, writers: Writers, *kinds: str) -> None:
    """Check that the topics are right, and that each planned fault has happened."""
    print(f"{dict(stage.struck)} {dict(writers.counts)}\n{verdict}")
    for violation in verdict.violations[:3]:
        for row_id in re.findall(r"row (\d+)", violation.what):
            print(stage.trace(int(row_id)))
    assert not verdict.violations, str(verdict)
    assert not stage.crashes, stage.crashes
    happened = {
        **{kind: stage.struck[kind] for kind in kinds},
        "rollbacks": writers.counts["rolled back"],
        "late commits": verdict.late,
        "merges": verdict.merged,
        "tombstones": verdict.tombstones,
        "repeats": verdict.repeats,
        "fenced producers": stage.count_lines("^fenced by kafka"),
    }
    assert not find_missing(happened)
    # No row is left, and nothing keeps the dead rows.
    assert stage.count_left() == 0
    assert stage.measure_outbox() < 2**20


@pytest.mark.expects("jobs.fenced", "loop.failed", "origins.lost")
@pytest.mark.guarantee("I18", "I19", "I20", "I21")
@pytest.mark.timeout(180)
def test_topics_get_all_committed_rows_in_order_through_every_fault(
    stage, server, own_broker
):
    faults = Faults(stage, server, own_broker, pods=2)
    faults.start_relays(**CALM)
    with Writers(stage.url, stage.states, stage.events, seed=1) as writers:
        wait_for(lambda: writers.counts["committed"] > 40, timeout=30)
    stage.await_empty()
    # No fault has happened yet, so nothing comes twice.
    calm = stage.judge()
    assert not calm.violations, str(calm)
    assert stage.explained == calm.repeats == 0
    faults.start_relays()
    with Writers(stage.url, stage.states, stage.events, seed=2) as writers:
        stage.kill_after_send("r0")
        stage.await_owners("r0", "r1")
        # A broker that is gone could not refuse them.
        stage.pause_until_fenced("r1", "r0", "r1", "r0", "r1")
        faults.cut()
        faults.kill_database(0)
        faults.kill_broker(0)
        before = writers.counts["committed"]
        wait_for(lambda: writers.counts["committed"] > before + 20, timeout=30)
    stage.await_empty()
    assert_right(
        stage,
        stage.judge(),
        writers,
        "kills after the send",
        "pauses",
        "cuts",
        "kills of the database",
        "kills of the broker",
    )


@pytest.mark.slow
@pytest.mark.expects("jobs.fenced", "loop.failed", "origins.lost")
@pytest.mark.guarantee("W8", "I23", "I39", "W43")
@pytest.mark.timeout(float(GIVEN or max(SECONDS.values())) + 900)
@pytest.mark.parametrize("what", ["relays", "all"])
def test_faults_at_random_leave_the_topics_right(stage, server, own_broker, what):
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(2**32))
    seconds = float(GIVEN or SECONDS[what])
    print(f"CHAOS_SEED={seed} CHAOS_SECONDS={seconds:g}")
    chance = random.Random(seed)
    faults = Faults(stage, server, own_broker, pods=3)
    faults.start_relays()
    choose = faults.of_relays if what == "relays" else faults.of_all
    until = time.monotonic() + seconds
    with Writers(
        stage.url, stage.states, stage.events, seed=seed, pause=0.03
    ) as writers:
        while time.monotonic() < until:
            # Each kind has its turn, so that none is left out; each turn has another
            # order.
            kinds = [*choose(chance)]
            for kind in chance.sample(kinds, len(kinds)):
                print(f"{until - time.monotonic():7.1f} s left: {kind}")
                choose(chance)[kind]()
                linger(chance.uniform(0, 6))
    stage.await_empty(timeout=120)
    assert_right(stage, stage.judge(timeout=600), writers, *kinds)
