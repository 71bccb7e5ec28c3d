"""Read topics from their beginning, as a consumer sees them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)

from jobs_lib.kafka.client import find_broker
from jobs_lib.partitioner import choose_partition
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Seen:
    """One record of a topic."""

    partition: int
    offset: int
    key: str
    """Empty if the record has none."""
    value: bytes | None
    headers: dict[str, str]
    at: float
    """The time of the record, in seconds."""

    @property
    def json(self) -> Any:
        """The value as JSON."""
        return None if self.value is None else json.loads(self.value)


def read_topic(
    bootstrap_servers: str,
    topic: str,
    *,
    timeout: float = 30.0,
    isolation: str = "read_committed",
) -> list[Seen]:
    """All records that a topic holds now, by partition and offset."""
    ends = _read_ends(bootstrap_servers, topic)
    consumer = _make_consumer(bootstrap_servers, isolation)
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in ends])
        seen: list[Seen] = []
        deadline = time.monotonic() + timeout
        while ends:
            assert time.monotonic() < deadline, f"the end of {topic} is not reached"
            message = consumer.poll(0.05)
            if message is not None and message.error() is None:
                seen.append(_see(message))
            # Go by position, never by count: markers and compaction leave gaps.
            for at in consumer.position([TopicPartition(topic, n) for n in ends]):
                if at.offset >= ends[at.partition]:
                    del ends[at.partition]
        return sorted(seen, key=lambda record: (record.partition, record.offset))
    finally:
        consumer.close()


def read_committed(
    bootstrap_servers: str, group: str, topic: str
) -> dict[int, int] | None:
    """The offsets that Kafka has of a group, by partition; None if nobody answers.

    A consumer that never joins asks: the admin client's question ends the process
    where the group has no coordinator (confluentinc/librdkafka issue 5040).
    """
    consumer = _make_consumer(bootstrap_servers, "read_uncommitted", group)
    try:
        numbers = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        asked = [TopicPartition(topic, number) for number in numbers]
        found = consumer.committed(asked, timeout=10) if asked else []
    except KafkaException:
        return None
    finally:
        consumer.close()
    return {one.partition: one.offset for one in found if one.offset >= 0}


def leave_offset(bootstrap_servers: str, group: str, topic: str, offset: int) -> None:
    """Leave an offset of the partition 0 in Kafka for a group without members."""
    consumer = _make_consumer(bootstrap_servers, "read_uncommitted", group)
    try:
        place = TopicPartition(topic, 0, offset)
        consumer.commit(offsets=[place], asynchronous=False)
    finally:
        consumer.close()


def _read_ends(bootstrap_servers: str, topic: str) -> dict[int, int]:
    """The ends of the partitions that are not empty.

    A consumer of committed records sees an earlier end while the markers of a commit
    are on their way. That can be so even after the producer has returned.
    """
    consumer = _make_consumer(bootstrap_servers, "read_uncommitted")
    try:
        ends = {}
        for number in consumer.list_topics(topic, timeout=10).topics[topic].partitions:
            if high := _read_end(consumer, TopicPartition(topic, number)):
                ends[number] = high
        return ends
    finally:
        consumer.close()


def _read_end(consumer: Consumer, partition: TopicPartition) -> int:
    def read() -> tuple[int, int] | None:
        try:
            return consumer.get_watermark_offsets(partition, timeout=10)
        except KafkaException as error:
            # A broker names itself leader of a new partition before it acts as one.
            if error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION:
                raise
        return None

    ends = wait_for(read, what=f"{partition} has a leader")
    assert ends is not None
    return ends[1]


def _make_consumer(
    bootstrap_servers: str, isolation: str, group: str | None = None
) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": group or f"reader-{uuid4().hex[:8]}",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": isolation,
        }
    )


def _see(message: Any) -> Seen:
    key = message.key()
    return Seen(
        message.partition(),
        message.offset(),
        "" if key is None else key.decode(),
        message.value(),
        {name: value.decode() for name, value in message.headers() or ()},
        message.timestamp()[1] / 1000,
    )


def make_producer(
    bootstrap_servers: str, partitioner: str = "murmur2_random"
) -> Producer:
    """A producer that keeps the order of a key's records.

    Without idempotence it may swap them where a topic was just made: the broker
    refuses the first request, and takes the second.
    """
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "partitioner": partitioner,
            "enable.idempotence": True,
            "reconnect.backoff.ms": 20,
        }
    )
    find_broker(producer, 0.5)
    return producer


def key_of(partition: int, partitions: int) -> str:
    """Find a key whose records go to a partition."""
    return next(k for k in "abcdefgh" if choose_partition(k, partitions) == partition)


def produce(
    bootstrap_servers: str,
    topic: str,
    records: Iterable[tuple[str | None, Any]],
    *,
    headers: dict[str, str] | None = None,
) -> None:
    """Produce (key, JSON value or bytes) and wait until the topic has them all."""
    producer = make_producer(bootstrap_servers)
    for key, value in records:
        encoded = value if isinstance(value, bytes | None) else json.dumps(value)
        producer.produce(topic, key=key, value=encoded, headers=dict(headers or {}))
        producer.poll(0)
    assert producer.flush(30) == 0
