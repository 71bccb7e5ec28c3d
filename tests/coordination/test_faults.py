"""Members behind networks and brokers that fail: the order of the log decides."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter

import pytest

from jobs_lib.coordination.log import Log
from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.coordination.messages import (
    ClaimingPartition,
    Heartbeat,
    Sender,
    Shared,
)
from jobs_lib.coordination.world import Outcome
from jobs_lib.settings import Settings
from tests.coordination.fleet import (
    BATCH,
    BOTH,
    GROUP,
    INTERVAL,
    SECONDS,
    Feed,
    find_owners,
    judge,
    read_time,
)
from tests.coordination.journals import read_run
from tests.support.cluster import Cluster

WAIT = 120.0
PARTITIONS = 4


@pytest.fixture
def read():
    """A function that starts to read a log: `read(servers, topic, "a")`."""
    opened: list[Log] = []

    def start(servers: str, topic: str, client_id: str, **more) -> Log:
        settings = Settings(kafka_bootstrap_servers=servers)
        sender = Sender(GROUP, client_id, f"{client_id}-1")
        log = Log(settings, topic, sender, interval=INTERVAL, **more)
        opened.append(log)
        log.start()
        return log

    yield start
    for log in opened:
        log.stop()


@pytest.fixture
def consume(run_process):
    """A function that starts a process: `consume(servers, log, topic, "a")`."""

    def start(servers, log, topic, client_id, **more):
        given = {
            "servers": servers,
            "log": log,
            "group": GROUP,
            "client_id": client_id,
            "topics": [topic],
            "interval": INTERVAL,
            "batch": BATCH,
            "seconds": SECONDS,
        }
        return run_process("-m", "tests.support.coordinated", json.dumps(given | more))

    return start


def await_owners(wait_for, log: Log, wanted: dict[str, int], workers) -> None:
    """Wait until these members hold so many partitions each."""
    wait_for(
        lambda: Counter(find_owners(log).values()) == wanted,
        timeout=WAIT,
        what=lambda: "\n".join(
            [f"{wanted}: {find_owners(log)}", *(one.output for one in workers)]
        ),
    )


def end(wait_for, servers, log, data, delivery, workers, feed) -> list[str]:
    """End all members once all is processed, and judge what they did."""
    ends = {number: feed.counts[number] for number in range(PARTITIONS)}
    wait_for(
        lambda: (
            [log.find(Shared(GROUP, data, number)).position or 0 for number in ends]
            == [*ends.values()]
        ),
        timeout=WAIT,
        what=lambda: "\n".join(
            [f"all are processed: {ends}", *(one.output for one in workers.values())]
        ),
    )
    for worker in workers.values():
        worker.signal(15)
    assert [one.wait() for one in workers.values()] == [0] * len(workers)
    # Each may have waited for a claim that was never answered, or read the log anew.
    runs = [
        read_run(one, name, may_lose=True, may_repeat=True)
        for name, one in workers.items()
    ]
    return judge(servers, log.topic, delivery, runs, data, ends)


@pytest.mark.guarantee("M22", "FK18", "I32")
@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize(
    ("cut", "mend", "delivery"),
    [
        ("hold", "release", "at_least_once"),
        pytest.param("freeze", "thaw", "at_most_once", marks=pytest.mark.slow),
        pytest.param("hold", "release", "at_most_once", marks=pytest.mark.slow),
        pytest.param("freeze", "thaw", "at_least_once", marks=pytest.mark.slow),
    ],
)
def test_a_member_that_was_cut_off_from_kafka_does_no_harm_when_it_is_back(
    own_broker, read, consume, wait_for, delivery, cut, mend
):
    servers = own_broker.bootstrap_servers
    name, data = own_broker.create(2, WANTED), own_broker.create(PARTITIONS)
    log = read(servers, name, "watch", only_reads=True)
    workers = {
        "far": consume(own_broker.proxied, name, data, "far", delivery=delivery),
        "near": consume(servers, name, data, "near", delivery=delivery),
    }
    await_owners(wait_for, log, {"far": 2, "near": 2}, workers.values())
    with Feed(servers, data, PARTITIONS, random.Random(1), burst=20) as feed:
        wait_for(
            lambda: any(
                log.find(Shared(GROUP, data, one)).position
                for one, who in find_owners(log).items()
                if who == "far"
            ),
            timeout=WAIT,
            what="it has processed something",
        )
        getattr(own_broker.proxy, cut)()
        await_owners(wait_for, log, {"near": 4}, workers.values())
        until = read_time(log) + 2_000 * INTERVAL
        wait_for(lambda: read_time(log) > until, timeout=WAIT, what="time passes")
        getattr(own_broker.proxy, mend)()
        await_owners(wait_for, log, {"far": 2, "near": 2}, workers.values())
        feed.stop()
    assert end(wait_for, servers, log, data, delivery, workers, feed) == []


@pytest.mark.guarantee("FK18", "M22")
@pytest.mark.expects("loop.failed")
@pytest.mark.slow
def test_a_broker_that_is_killed_during_claims_leaves_one_holder_of_each_partition(
    own_broker, read, consume, wait_for
):
    servers = own_broker.bootstrap_servers
    name, data = own_broker.create(2, WANTED), own_broker.create(PARTITIONS)
    log = read(servers, name, "watch", only_reads=True)
    workers = {"a": consume(servers, name, data, "a")}
    await_owners(wait_for, log, {"a": PARTITIONS}, workers.values())
    workers["b"] = consume(servers, name, data, "b")
    wait_for(
        lambda: "b" in find_owners(log).values(),
        timeout=WAIT,
        what="the second one has its first claim",
    )
    with own_broker.down():
        pass
    await_owners(wait_for, log, {"a": 2, "b": 2}, workers.values())
    with Feed(servers, data, PARTITIONS, random.Random(2), burst=20) as feed:
        wait_for(lambda: len(feed.counts) == PARTITIONS, what="each has records")
        feed.stop()
    faults = end(wait_for, servers, log, data, "at_least_once", workers, feed)
    assert faults == []


@pytest.mark.guarantee("FK18")
def test_a_heartbeat_that_comes_more_than_two_intervals_late_has_no_effect(
    own_broker, read, wait_for
):
    name = own_broker.create(1, WANTED)
    far = read(own_broker.proxied, name, "far")
    near = read(own_broker.bootstrap_servers, name, "b")
    shared = Shared(GROUP, "orders", 0)
    claim = ClaimingPartition(far.sender, shared, round(1_000 * INTERVAL))
    sent = far.send(claim)
    assert sent.wait(WAIT) is Outcome.VALID
    assert sent.offset is not None
    beat = Heartbeat(far.sender, shared, sent.offset, 5)
    assert far.send(beat).wait(WAIT) is Outcome.VALID
    # Without it, a claim would be right at once: nobody would hold anything.
    near.read_to_end()
    own_broker.proxy.freeze()
    late = far.send(beat._replace(position=9))

    def is_stale() -> bool:
        near.probe([0], INTERVAL / 10)
        with near.lock:
            return near.get_world(0).judge(near.sender, shared) is Outcome.VALID

    wait_for(is_stale, timeout=WAIT, what="the holding is stale")
    taken = near.send(claim._replace(sender=near.sender))
    assert taken.wait(WAIT) is Outcome.VALID
    assert taken.offset is not None
    own_broker.proxy.thaw()
    assert late.wait(WAIT) is Outcome.NOT_HELD
    far.read_to_end()
    for log in (far, near):
        position, holding = log.find(shared)
        assert (position, holding.claim) == (5, taken.offset)


@pytest.mark.guarantee("FK18", "M8")
def test_of_two_claims_in_the_same_millisecond_the_first_in_the_log_wins(
    log_topic, open_log
):
    name = log_topic(1)
    logs = [open_log(name, "a"), open_log(name, "b")]
    times: dict[int, int] = {}
    real = logs[0]._places[0].fold

    def fold(offset, time_ms, partitions, said, own):
        times[offset] = time_ms
        return real(offset, time_ms, partitions, said, own)

    logs[0]._places[0].fold = fold
    within = 0
    for number in range(1_000):
        shared = Shared(GROUP, "orders", number)
        sent = claim_at_once(logs, shared)
        first, second = sorted(sent, key=lambda one: one.offset)
        assert [first.outcome, second.outcome] == [Outcome.VALID, Outcome.HELD]
        for log in logs:
            log.read_to_end()
        holdings = [log.find(shared).holding for log in logs]
        assert [one.claim for one in holdings] == [first.offset] * 2
        within += times[second.offset] - times[first.offset] <= 1
        if within >= 3:
            return
    pytest.fail("no two claims came within a millisecond")


def claim_at_once(logs, shared):
    """Let both claim a partition, and wait until they have read it back."""
    barrier = threading.Barrier(len(logs))
    sent = []

    def claim(log) -> None:
        message = ClaimingPartition(log.sender, shared, 60_000)
        barrier.wait()
        sent.append(log.send(message))

    threads = [threading.Thread(target=claim, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in sent:
        one.wait(WAIT)
    return sent


@pytest.mark.guarantee("FK18", "M22")
@pytest.mark.expects("loop.failed")
@pytest.mark.slow
@pytest.mark.timeout(900)
@BOTH
def test_leaders_of_the_log_that_change_leave_one_holder_and_the_stated_delivery(
    read, consume, wait_for, delivery
):
    with Cluster() as cluster:
        servers = cluster.bootstrap_servers
        name, data = cluster.create(2, WANTED), cluster.create(PARTITIONS)
        log = read(servers, name, "watch", only_reads=True)
        workers = {
            one: consume(servers, name, data, one, delivery=delivery) for one in "ab"
        }
        await_owners(wait_for, log, {"a": 2, "b": 2}, workers.values())
        with Feed(servers, data, PARTITIONS, random.Random(3), burst=20) as feed:
            # A place without a partition has no records.
            for place in {log.find_place(Shared(GROUP, data, n)) for n in range(4)}:
                before = log.get_world(place).next_offset
                with cluster.down(cluster.leader_of(name, place)):
                    wait_for(
                        lambda at=place, so_far=before: (
                            log.get_world(at).next_offset > so_far + 20
                        ),
                        timeout=WAIT,
                        what="the log goes on at another node",
                    )
            feed.stop()
        assert end(wait_for, servers, log, data, delivery, workers, feed) == []
        log.stop()
