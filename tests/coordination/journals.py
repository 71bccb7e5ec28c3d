"""What the processes of a test have written down, and all records of a log."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition

from tests.coordination.checker import Batch, Places, Run, Told
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from tests.support.worker import Worker

_HANDLED = re.compile(r"handled (\d+) (\d+) (\d+) (\d+)")
_DONE = re.compile(r"done (\d+) (\d+)")
_TOLD = re.compile(r"told (\d+) (\d+) (\d+)")
_INSTANCE = re.compile(r"instance (\w+)")


def read_run(worker: Worker, client_id: str, **more: bool) -> Run:
    """Read what a process has written: see `tests.support.coordinated`."""
    lines = list(worker.lines)
    instance = next((m[1] for line in lines if (m := _INSTANCE.fullmatch(line))), "")
    batches: list[Batch] = []
    told: list[Told] = []
    done = 0
    for line in lines:
        if match := _HANDLED.fullmatch(line):
            batches.append(Batch(*map(int, match.groups())))
        elif match := _DONE.fullmatch(line):
            begun_ms, done_ms = map(int, match.groups())
            batches[-1] = replace(batches[-1], begun_ms=begun_ms, done_ms=done_ms)
            done = len(batches)
        elif match := _TOLD.fullmatch(line):
            partition, position, claim = map(int, match.groups())
            told.append(Told(partition, position, claim, done))
    return Run(client_id, instance, tuple(batches), told=tuple(told), **more)


def read_log(servers: str, topic: str) -> Places:
    """Read all records that a log has now."""
    given: dict[str, Any] = {"bootstrap.servers": servers, "group.id": "nobody"}
    consumer = Consumer(given | {"auto.offset.reset": "earliest"})
    try:
        parts = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        ends = {
            number: consumer.get_watermark_offsets(
                TopicPartition(topic, number), timeout=30
            )[1]
            for number in parts
        }
        consumer.assign([TopicPartition(topic, number, 0) for number in parts])
        found: Places = {number: [] for number in parts}

        def is_read() -> bool:
            for message in consumer.consume(1_000, 0.1):
                assert message.error() is None, message.error()
                value = message.value()
                assert value is None or isinstance(value, bytes)
                found[message.partition() or 0].append(
                    (message.offset() or 0, message.timestamp()[1], value)
                )
            return all(len(found[number]) >= end for number, end in ends.items())

        wait_for(is_read, timeout=120, what="the log is read")
    finally:
        consumer.close()
    return found
