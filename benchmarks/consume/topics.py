"""The topics that are read: states of the same keys again and again.

The records are what a relay writes: JSON of 291 bytes and the headers of CloudEvents,
in random order over the keys, with tombstones at the end. Among them are marks: rows of
one partition each, which show how far a consumer is.
"""

from __future__ import annotations

import json
import random
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewTopic,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTITIONS = 8
MARKS = 50
"""Marks of each partition, besides the one at its end."""
_CONFIG = {
    "cleanup.policy": "compact",
    # Nothing is compacted during the benchmark: all read the same records.
    "segment.ms": "604800000",
    "min.compaction.lag.ms": "604800000",
}
_HEADERS = {
    "ce_specversion": "1.0",
    "ce_type": "aircraft-state",
    "ce_source": "bench",
    "ce_cause": "live",
    "content-type": "application/json",
    "ce_time": "2026-11-23T18:00:00.000000Z",
}
Row = tuple[str, int, int, int]
"""Airport, flights, minutes late and version."""


class State(NamedTuple):
    """A record: the state of a key, or its end."""

    key: str
    version: int
    flights: int = 0
    gone: bool = False
    partition: int = -1
    """The partition that it must go to; the key decides if it is negative."""

    @property
    def row(self) -> Row:
        """Its row, without the key."""
        return "VIE", self.flights, self.flights % 60, self.version

    @property
    def value(self) -> bytes | None:
        """The record's value."""
        if self.gone:
            return None
        airport, flights, late, version = self.row
        return json.dumps(
            {
                "tail": self.key,
                "airport": airport,
                "flights": flights,
                "minutes_late": late,
                "version": version,
                "operator": "Example Air",
                "model": "A320-214",
                "last_flight": f"EA{flights:04}",
                "note": "x" * 120,
            }
        ).encode()

    @property
    def headers(self) -> list[tuple[str, str | bytes | None]]:
        """The headers that a relay writes."""
        version = str(self.version)
        return [("ce_id", version), *_HEADERS.items(), ("ce_version", version)]


def make_states(records: int, keys: int) -> Iterator[State]:
    """The same states each time: those of the keys, then tombstones, and the marks.

    Args:
        records: how many states of keys, at least one for each mark.
        keys: how many keys; one of 100 gets a tombstone in the end.
    """
    # The same numbers in every run, so that two runs can be compared.
    rng = random.Random(7)
    versions = [0] * keys
    every = max(1, records // MARKS)
    for number in range(1, records + 1):
        key = rng.randrange(keys)
        versions[key] += 1
        yield State(f"N{key:06}", versions[key], rng.randrange(1_000))
        if number % every == 0:
            yield from _mark(f"{number // every:03}")
    for key in range(max(1, keys // 100)):
        yield State(f"N{key:06}", versions[key] + 1, gone=True)
    yield from _mark("end")


def _mark(name: str) -> Iterator[State]:
    for partition in range(PARTITIONS):
        yield State(f"mark-{partition}-{name}", 1, partition=partition)


@dataclass
class Topic:
    """A topic with records, and what a consumer must make of them."""

    name: str
    records: int = 0
    """States, tombstones and marks."""
    value_bytes: int = 0
    marks: list[str] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    """The rows of a table that is equal to the topic, by key."""
    gone: set[str] = field(default_factory=set)
    """The keys whose last record is a tombstone."""
    sums: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How many records each key has, and their versions' sum without tombstones."""

    def note(self, state: State, value: bytes | None) -> None:
        """Take a record into account."""
        self.records += 1
        self.value_bytes += len(value or b"")
        if state.gone:
            self.rows.pop(state.key, None)
            self.gone.add(state.key)
        else:
            self.rows[state.key] = state.row
        count, versions = self.sums.get(state.key, (0, 0))
        self.sums[state.key] = (
            count + 1,
            versions + (0 if state.gone else state.version),
        )
        if state.partition >= 0:
            self.marks.append(state.key)


def produce(producer: Producer, topic: str, state: State, value: bytes | None) -> None:
    """Produce a state; wait while the producer's queue is full."""
    while True:
        try:
            producer.produce(
                topic,
                value,
                state.key,
                partition=state.partition,
                headers=state.headers,
            )
            return
        except BufferError:
            producer.poll(0.05)


class Topics:
    """The topics of one run, each filled at its first use."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._broker = bootstrap_servers
        self._admin = AdminClient(
            {"bootstrap.servers": bootstrap_servers, "log_level": 0}
        )
        self._filled: dict[tuple[int, int], Topic] = {}

    def fill(self, records: int, keys: int) -> Topic:
        """The topic with these states."""
        known = self._filled.get((records, keys))
        if known is None:
            known = self._filled[records, keys] = self._fill(records, keys)
        return known

    def make(self, partitions: int = PARTITIONS) -> Topic:
        """A new empty topic."""
        name = f"bench-{uuid.uuid4().hex[:8]}"
        new = NewTopic(name, partitions, 1, config=_CONFIG)
        self._admin.create_topics([new])[name].result(30)
        return Topic(name)

    def open_producer(self, **more: Any) -> Producer:
        """A producer with the partitioner and the compression of a relay."""
        return Producer(
            {
                "bootstrap.servers": self._broker,
                "partitioner": "murmur2_random",
                "compression.type": "lz4",
                "linger.ms": 5,
                "acks": "all",
                "enable.idempotence": True,
                # What matters is raised; the rest is about a broker that starts.
                "log_level": 0,
                **more,
            }
        )

    def _fill(self, records: int, keys: int) -> Topic:
        topic = self.make()
        producer = self.open_producer(**{"queue.buffering.max.messages": 500_000})
        for state in make_states(records, keys):
            value = state.value
            topic.note(state, value)
            produce(producer, topic.name, state, value)
            if topic.records % 10_000 == 0:
                producer.poll(0)
        if left := producer.flush(120):
            raise TimeoutError(f"{left} records of {topic.name} were not acknowledged")
        self._read(topic)
        return topic

    def _read(self, topic: Topic) -> None:
        """Read it twice: a broker that has to compile its code answers slowly."""
        for _ in range(2):
            consumer = Consumer(
                {
                    "bootstrap.servers": self._broker,
                    "group.id": "bench",
                    "enable.auto.commit": False,
                    "enable.partition.eof": True,
                }
            )
            consumer.assign(
                [TopicPartition(topic.name, n, 0) for n in range(PARTITIONS)]
            )
            seen = ended = 0
            while ended < PARTITIONS:
                for message in consumer.consume(10_000, 0.2):
                    if message.error():
                        ended += 1
                    else:
                        seen += 1
            consumer.close()
            if seen != topic.records:
                raise RuntimeError(
                    f"{topic.name} has {seen} records, not {topic.records}"
                )
