"""Check Kafka: declared topics exist, and records lie in the partitions of murmur2."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition

from jobs_lib.kafka.client import count_partitions, make_consumer
from jobs_lib.operating.checks.finding import Finding, names
from jobs_lib.partitioner import murmur2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.operating.checks.finding import Target
    from jobs_lib.settings import Settings

# The sample: partitions of each topic, and records of each partition.
_PARTITIONS = 16
_RECORDS = 20
# librdkafka's offset for this number of records before the end.
_TAIL = -2_000 - _RECORDS
_FIRST_SECONDS = 3.0
_QUIET_SECONDS = 1.0
_SECONDS = 10.0


def check_topics(target: Target) -> Iterator[Finding]:
    """Check that declared topics exist and have as many partitions as recorded."""
    if not target.settings.kafka_bootstrap_servers:
        return
    counts: dict[str, int] = {}
    grown: set[str] = set()
    for topic, declared, home in target.rows("read_topics"):
        if topic == "local":
            continue  # the home of services without Kafka
        there = count_partitions(target.settings, topic)
        if not there:
            yield Finding(
                "error",
                "topics",
                f"the topic {topic} is declared and Kafka does not have it",
                f"create it with {declared} partitions",
            )
            continue
        if there != declared:
            use = "groups go to the first" if there > declared else "groups would need"
            yield Finding(
                "warn" if there > declared else "error",
                "topics",
                f"the topic {topic} has {there} partitions in Kafka and {declared} are "
                "recorded" + (f": {use} {declared}" if home else ""),
                "a topic that has grown keeps its recorded count until it is switched"
                if there > declared
                else f"give it {declared} partitions again",
            )
        counts[topic] = there
        if there != declared:
            grown.add(topic)
    yield from _check_records(target.settings, counts, grown)


def _check_records(
    settings: Settings, counts: dict[str, int], grown: set[str]
) -> Iterator[Finding]:
    keyed: Counter[str] = Counter()
    strays: defaultdict[str, list[str]] = defaultdict(list)
    for topic, partition, key in _sample(settings, counts):
        keyed[topic] += 1
        if (murmur2(key) & 0x7FFFFFFF) % counts[topic] != partition:
            strays[topic].append(f"{key.decode(errors='replace')} in {partition}")
    for topic, found in strays.items():
        yield Finding(
            "warn" if topic in grown else "error",
            "partitioner",
            f"{len(found)} of {keyed[topic]} sampled records of {topic} lie in other "
            f"partitions than murmur2 gives their keys: {names(found)}",
            "set partitioner=murmur2_random where they are produced, or has the topic "
            "grown since?",
        )


def _sample(
    settings: Settings, counts: dict[str, int]
) -> Iterator[tuple[str, int, bytes]]:
    """Yield topics, partitions and keys of some of the latest records."""
    if not counts:
        return
    consumer = make_consumer(settings, "jobs_lib-check")
    try:
        # Assigned by hand: no group is joined, and no offset is committed.
        consumer.assign(
            [
                TopicPartition(topic, n, _TAIL)
                for topic, count in counts.items()
                for n in range(min(count, _PARTITIONS))
            ]
        )
        # Do not wait for the last offset: it may be a transaction's marker, no record.
        deadline, patience = time.monotonic() + _SECONDS, _FIRST_SECONDS
        while time.monotonic() < deadline:
            message = consumer.poll(patience)
            if message is None:
                return
            key = message.key()
            if message.error() is None and key is not None:
                patience = _QUIET_SECONDS
                raw = key.encode() if isinstance(key, str) else key
                yield message.topic() or "", message.partition() or 0, raw
    finally:
        consumer.close()
