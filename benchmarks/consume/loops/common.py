"""What the loops share: their environment, the consumer, a record as a row."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import psycopg
from confluent_kafka import Consumer, Message, TopicPartition

TOPIC = os.environ["BENCH_TOPIC"]
GROUP = os.environ["BENCH_GROUP"]
BROKER = os.environ["BENCH_BROKER"]
DATABASE = os.environ["BENCH_DATABASE"]
Row = tuple[Any, ...]


def open_consumer(*, auto_commit: bool) -> Consumer:
    """A consumer that begins with the oldest record; SIGTERM ends the process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    return Consumer(
        {
            "bootstrap.servers": BROKER,
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": auto_commit,
            "session.timeout.ms": 6_000,
            "heartbeat.interval.ms": 1_000,
        }
    )


def take(consumer: Consumer, count: int, seconds: float) -> list[Message]:
    """The next records: this many at most, or those of this time."""
    return [m for m in consumer.consume(count, seconds) if not m.error()]


def key_of(message: Message) -> str:
    """The key of a record, as text."""
    key = message.key()
    return key.decode() if isinstance(key, bytes) else str(key)


def row_of(message: Message) -> Row | None:
    """The row of a record; None for a tombstone."""
    value = message.value()
    if value is None:
        return None
    state = json.loads(value)
    return (
        key_of(message),
        state["airport"],
        state["flights"],
        state["minutes_late"],
        state["version"],
    )


def connect(*, autocommit: bool = False) -> psycopg.Connection[Any]:
    """A connection to the database that the table is in."""
    return psycopg.connect(DATABASE, autocommit=autocommit)


def ends_of(messages: list[Message]) -> dict[int, int]:
    """The next offset of each partition, once these records have been applied."""
    return {m.partition() or 0: (m.offset() or 0) + 1 for m in messages}


def assign_stored(
    connection: psycopg.Connection[Any],
    consumer: Consumer,
    partitions: list[TopicPartition],
) -> None:
    """Begin where the offsets in the database say; needs autocommit mode."""
    stored = dict(
        connection.execute(
            "select partition, next_offset from kafka_offsets"
            " where consumer_group = %s and topic = %s",
            (GROUP, TOPIC),
        ).fetchall()
    )
    consumer.assign(
        [
            TopicPartition(TOPIC, p.partition, stored.get(p.partition, p.offset))
            for p in partitions
        ]
    )
