"""A process that consumes, over a coordination log or in a consumer group.

It writes a line when the first record of a partition comes: `has PARTITION`. The first
argument is `coordination`, `classic` or `consumer`, the second one JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import Any

from jobs_lib import coordination
from jobs_lib.settings import Settings


class Noted:
    """Notes of which partitions records have come."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def note(self, partition: int) -> None:
        """Write a line, the first time."""
        if partition not in self._seen:
            self._seen.add(partition)
            print(f"has {partition}", flush=True)


def coordinate(given: dict[str, Any]) -> None:
    """Consume over a coordination log, until a signal comes."""
    noted = Noted()

    def handle(records: list[coordination.Record]) -> None:
        noted.note(records[0].partition)

    coordination.Consumer(
        Settings(kafka_bootstrap_servers=given["servers"]),
        log=given["log"],
        group=given["group"],
        client_id=given["client_id"],
        topics=[given["topic"]],
        handle=handle,
        interval=given["interval"],
        start="latest",
    ).run()


def join(given: dict[str, Any], protocol: str) -> None:
    """Consume in a group, until a signal comes: a loop that one writes by hand."""
    from confluent_kafka import Consumer

    from jobs_lib.signals import handle_signals

    ended, noted = threading.Event(), Noted()
    handle_signals((signal.SIGTERM, signal.SIGINT), lambda _: ended.set())
    settings: dict[str, Any] = {
        "bootstrap.servers": given["servers"],
        "group.id": given["group"],
        "client.id": given["client_id"],
        "group.protocol": protocol,
        "auto.offset.reset": "latest",
        "auto.commit.interval.ms": 300,
    }
    if protocol == "classic":
        settings |= {
            # As long as two intervals.
            "session.timeout.ms": int(2_000 * given["interval"]),
            "heartbeat.interval.ms": 300,
            "partition.assignment.strategy": "cooperative-sticky",
        }
    consumer = Consumer(settings)
    consumer.subscribe([given["topic"]])
    while not ended.is_set():
        message = consumer.poll(0.05)
        if message is not None and message.error() is None:
            noted.note(message.partition() or 0)
    consumer.close()


def main() -> None:
    """Run as the arguments say."""
    kind, given = sys.argv[1], json.loads(sys.argv[2])
    if kind == "coordination":
        coordinate(given)
    else:
        join(given, kind)


if __name__ == "__main__":
    main()
