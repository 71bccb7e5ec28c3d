"""The fold of a log, a start behind many records, and the bytes of an idle log."""

from __future__ import annotations

import itertools
import time
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING

from confluent_kafka import Producer

from benchmarks.coordination.stage import GROUP, LONG, Figures, Stage, tell
from benchmarks.figures import median
from benchmarks.ownership.pods import wait_until
from jobs_lib.coordination import Member
from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    Sender,
    Shared,
    encode,
    find_place,
)
from jobs_lib.coordination.snapshots import split
from jobs_lib.coordination.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTITIONS = 100
MEMBERS = 10
_BEATS_AN_HOUR = 3 * 3_600 / 10
"""Of a partition, at the default interval of ten seconds."""


def measure_fold(stage: Stage) -> Figures:
    """Fold logs that are in memory already: one of heartbeats, and one of batches."""
    count = stage.size(400_000, 20_000)
    figures: Figures = {}
    for name, at_most_once in (("", False), ("_at_most_once", True)):
        records = [encode(one, 1) for one in write_log(count, 1, 0, at_most_once)]
        rates: list[float | None] = []
        for _ in range(stage.size(5, 1)):
            world = World(0)
            began = time.perf_counter()
            for offset, value in enumerate(records):
                world.apply(offset, offset, value)
            rates.append(count / (time.perf_counter() - began))
        figures[f"fold_events_s{name}"] = median(rates)
        tell(f"fold{name}: {rates}")
    return figures


def measure_start(stage: Stage) -> Figures:
    """Start behind many records, without a snapshot and with one."""
    count = stage.size(1_000_000, 20_000)
    topic = stage.make_log(places := 8)
    _fill(stage, topic, count, places)
    figures: Figures = {
        "start_events": count,
        "start_with_1m_events_s": _start(stage, topic),
    }
    tell(f"start without a snapshot: {figures}")
    _write_snapshots(stage, topic)
    figures["start_with_1m_events_and_snapshot_s"] = _start(stage, topic)
    return figures


def measure_bytes(stage: Stage) -> Figures:
    """Count what a log grows by on the broker's disk while its members only keep."""
    topic, data = stage.make_log(8), stage.make_topic("idle", PARTITIONS)
    with ExitStack() as stack:
        members = [
            stack.enter_context(
                Member(
                    stage.settings,
                    log=topic,
                    group=GROUP,
                    client_id=f"m-{number}",
                    topics=[data],
                    listener=_Nobody(),
                    interval=1.0,
                )
            )
            for number in range(2)
        ]
        wait_until(
            lambda: sum(len(one.list_held()) for one in members) == PARTITIONS,
            LONG,
            "all are held",
        )
        log = stack.enter_context(stage.make_reader(topic, "watch", only_reads=True))
        first, before = _count(log.get_worlds()), _size(stage, topic)
        time.sleep(stage.size(20, 3))
        log.read_to_end(LONG)
        records, grown = _count(log.get_worlds()) - first, _size(stage, topic) - before
    each = grown / records
    return {
        "log_bytes_a_heartbeat": each,
        "log_bytes_an_hour_100_partitions": each * _BEATS_AN_HOUR * PARTITIONS,
    }


class _Nobody:
    """Holds, and does nothing with it."""

    def taken(self, shared: Shared, position: int | None) -> None: ...

    def leave(self, shared: Shared) -> None: ...

    def lost(self, shared: Shared) -> None: ...

    def ended(self, error: Exception) -> None: ...


def write_log(
    count: int, places: int, place: int, at_most_once: bool = False
) -> Iterator[Message]:
    """Write the log of ten members that share a hundred partitions."""
    senders = [
        Sender(GROUP, f"member-{number}", uuid.uuid4().hex) for number in range(MEMBERS)
    ]
    # A place has those partitions whose records stand there.
    numbers = (n for n in itertools.count() if find_place("data", n, places) == place)
    held: list[tuple[Sender, Shared, int]] = []
    for offset, number in enumerate(itertools.islice(numbers, PARTITIONS // places)):
        sender = senders[number % MEMBERS]
        shared = Shared(GROUP, "data", number)
        held.append((sender, shared, offset))
        yield ClaimingPartition(sender, shared, 10_000)
    for sender, shared, claim in held:
        yield Heartbeat(sender, shared, claim, None)
    for number in range(count - 2 * len(held)):
        sender, shared, claim = held[number % len(held)]
        turn = number // len(held)
        if at_most_once:
            first = 100 * turn or None
            yield ClaimingMessages(sender, shared, claim, first, 100 * turn + 100)
        else:
            yield Heartbeat(sender, shared, claim, 100 * turn)


def _fill(stage: Stage, topic: str, count: int, places: int) -> None:
    producer = Producer(
        {
            "bootstrap.servers": stage.broker.bootstrap_servers,
            "linger.ms": 20,
            "compression.type": "lz4",
        }
    )
    for place in range(places):
        for message in write_log(count // places, places, place):
            while True:
                try:
                    producer.produce(topic, encode(message, places), partition=place)
                    break
                except BufferError:
                    producer.poll(0.1)
        producer.poll(0)
    if producer.flush(LONG):
        raise RuntimeError("the broker does not take all records in time")


def _start(stage: Stage, topic: str) -> float:
    log = stage.make_reader(topic, only_reads=True)
    began = time.perf_counter()
    with log:
        return time.perf_counter() - began


def _write_snapshots(stage: Stage, topic: str) -> None:
    with stage.make_reader(topic) as log:
        with log.lock:
            parts = [
                (world.place, part)
                for world in log.get_worlds()
                for part in split(world, log.sender)
            ]
        for place, part in parts:
            log.send(part, place=place).wait(LONG)


def _count(worlds: list[World]) -> int:
    return sum(world.next_offset for world in worlds)


def _size(stage: Stage, topic: str) -> int:
    """The bytes of the topic's records on the broker's disk."""
    data = stage.broker.folder / "data"
    return sum(file.stat().st_size for file in data.glob(f"{topic}-*/*.log"))
