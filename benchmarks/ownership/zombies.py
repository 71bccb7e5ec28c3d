"""Zombies: pods that stand still until they count as dead, and then go on.

Each pod reads records, runs the jobs of these, and sends their values. So a stopped pod
is a zombie of three kinds.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.ownership.locks import watch_locks
from benchmarks.ownership.pods import deployed, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bench import Bench, Figures
    from benchmarks.ownership.pods import Deployment
    from jobs_lib.devstack import KafkaBroker

PARTITIONS = 12
ROLES = ("consume", "execute", "relay")
KEYS = [f"key-{n}" for n in range(60)]
_AT_ONCE = 0.02
_SESSION = 1.5


def measure(bench: Bench, broker: KafkaBroker) -> Figures:
    """Stop pods for longer than their sessions, repeatedly, and count what they do."""
    wanted = bench.size(200, quick=6)
    # The stops are the same each time; the machine decides where they hit.
    chance = random.Random(7)
    zombies: Counter[str] = Counter()
    names = [f"pod-{n}" for n in range(4)]
    with (
        deployed(
            bench.server,
            broker,
            partitions=PARTITIONS,
            assignment_strategy="cooperative-sticky",
            session_timeout=_SESSION,
            stale_after=_SESSION,
            heartbeat_interval=0.3,
        ) as pods,
        bench.server.connect() as connection,
        watch_locks(bench.server, bench.tell) as waiting,
    ):
        pods.start(*names)
        pods.await_shared(connection, *names, seconds=120)
        with _producing(pods) as produced:
            while min(zombies[role] for role in ROLES) < wanted:
                stopped = chance.sample(names, 2)
                zombies += _stop(pods, connection, stopped)
                bench.tell(f"zombies: {dict(zombies)}")
                for name in names:
                    if any(p.poll() is not None for p in pods.pods[name].processes):
                        raise RuntimeError(f"{name} ended: {pods.pods[name].said}")
        total = sum(produced.values())

        def done() -> bool:
            row = connection.execute(
                "select (select count(distinct job) from ran),"
                " (select count(*) from jobs_lib.jobs),"
                " (select count(*) from jobs_lib.outbox)"
            ).fetchone()
            return row == (total, 0, 0)

        wait_until(done, 300, f"all of {total} records are done")
        twice = {
            "execute": "select count(*) - count(distinct job) from ran",
            "consume": "select count(*) - count(distinct (partition, position))"
            " from read",
        }
        effects = {role: bench.server.ask(query) for role, query in twice.items()}
        found = _read_topic(pods)
    effects["relay"] = sum(
        _count_out_of_order(values, produced[key]) for key, values in found.items()
    ) + len(produced.keys() - found.keys())
    sent_again = sum(len(values) for values in found.values()) - total
    bench.tell(f"{total} records, effects of zombies: {effects}")
    return {
        "zombies": dict(zombies),
        "zombie_records": total,
        "zombie_effects": sum(effects.values()),
        "zombie_effects_by_kind": effects,
        "records_sent_again": sent_again,
        "claims_waiting_on_locks": waiting["claims"],
        "claims_seen": waiting["running"],
        "lock_samples": waiting["samples"],
    }


def _stop(pods: Deployment, connection: Any, names: list[str]) -> Counter[str]:
    """Stop some pods until others own their origins; return their kinds as zombies."""
    before = {role: pods.owners(connection, role) for role in ROLES}
    for name in names:
        pods.pods[name].send(signal.SIGSTOP)

    def taken(role: str, name: str) -> bool:
        owned = {o for o, (pod, _) in before[role].items() if pod == name}
        after = pods.owners(connection, role)
        return bool(owned) and all(after.get(o, (name, 0))[0] != name for o in owned)

    def all_taken() -> bool:
        return all(
            taken(role, name) or not _owns(before[role], name)
            for role in ROLES
            for name in names
        )

    wait_until(all_taken, 60, f"{names} are replaced")
    kinds = Counter(r for r in ROLES for name in names if taken(r, name))
    for name in names:
        pods.pods[name].send(signal.SIGCONT)

    def back() -> bool:
        return all(
            _owns(pods.owners(connection, role), name)
            for role in ROLES
            for name in names
        )

    wait_until(
        back,
        60,
        lambda: f"{names} own again: {[pods.pods[n].said for n in names]}",
    )
    return kinds


def _owns(owners: dict[str, tuple[str, int]], name: str) -> bool:
    return any(pod == name for pod, _ in owners.values())


@contextlib.contextmanager
def _producing(pods: Deployment) -> Iterator[Counter[str]]:
    """A steady stream of records, counted by key: the value is the count before."""
    assert pods.broker is not None
    producer = Producer({"bootstrap.servers": pods.broker.bootstrap_servers})
    counts: Counter[str] = Counter()
    stop = threading.Event()

    def produce() -> None:
        due = time.monotonic()
        keys = list(KEYS)
        while not stop.wait(max(0.0, due - time.monotonic())):
            random.shuffle(keys)
            for key in keys[:4]:
                producer.produce(pods.topic, str(counts[key]), key)
                counts[key] += 1
            producer.poll(0)
            due += _AT_ONCE
        producer.flush()

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield counts
    finally:
        stop.set()
        thread.join()


def _read_topic(pods: Deployment) -> dict[str, list[int]]:
    """The committed values of each key in the topic, in order."""
    assert pods.broker is not None
    topic = f"{pods.topic}-state"
    settings = {
        "bootstrap.servers": pods.broker.bootstrap_servers,
        "group.id": "reader",
        "enable.auto.commit": False,
    }
    parts = [TopicPartition(topic, n, 0) for n in range(4)]
    # A reader of committed records sees no end while markers are on their way.
    reader = Consumer(settings | {"isolation.level": "read_uncommitted"})
    ends = {p.partition: reader.get_watermark_offsets(p)[1] for p in parts}
    reader.close()
    consumer = Consumer(settings | {"isolation.level": "read_committed"})
    consumer.assign(parts)
    found: dict[str, list[int]] = {}
    deadline = time.monotonic() + 120
    while any(at.offset < ends[at.partition] for at in consumer.position(parts)):
        if time.monotonic() > deadline:
            raise RuntimeError("the topic could not be read to its end")
        for record in consumer.consume(1_000, 0.1):
            key, value = record.key(), record.value()
            if key is not None and value is not None:
                found.setdefault(key.decode(), []).append(int(value))
    consumer.close()
    return found


def _count_out_of_order(values: list[int], produced: int) -> int:
    """Count the records that no live owner can have sent.

    A block may be sent again from its start, and then continues without a gap. If the
    values go back and then continue past a gap, a zombie's record lies in between. An
    old last record is a zombie's, too.
    """
    gaps = sum(b > a + 1 for a, b in pairwise([-1, *values]))
    return gaps + (values[-1] != produced - 1)
