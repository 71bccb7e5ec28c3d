"""Producers of the same shards that fence each other as fast as they can.

python -m tests.support.outbox.fencers BOOTSTRAP_SERVERS TOPICS SECONDS
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from uuid import UUID

from confluent_kafka import KafkaException

from jobs_lib.kafka.reach import Reach
from jobs_lib.outbox.block import LIVE, OutboxRecord
from jobs_lib.outbox.producers import ShardProducers
from jobs_lib.settings import load_settings
from tests.support.say import say

_SHARDS = 16
_SENDERS = 3


def fence(producers: ShardProducers, topics: list[str], chance: random.Random) -> None:
    """Take over some shards, and send a block of each."""
    shards = {chance.randrange(_SHARDS) for _ in range(3)}
    producers.keep(shards | {s for s in producers.shards if chance.random() < 0.7})
    for shard in producers.fence_off(shards):
        producers.drop(shard)
    for shard in producers.shards:
        # The records go to several partitions: each of these may refuse on its own.
        records = [
            OutboxRecord(
                chance.choice(topics),
                f"k{n}",
                b"x" * 100,
                LIVE,
                n,
                b"",
                [("a", "b")],
                "2026-03-01T12:00:00",
            )
            for n in range(chance.randint(1, 20))
        ]
        try:
            producers.send(shard, records, lambda: None)
        except KafkaException:
            producers.drop(shard)


def main() -> None:
    """Run for some seconds."""
    servers, topics, seconds = sys.argv[1:]
    until = time.monotonic() + float(seconds)
    settings = load_settings(kafka_bootstrap_servers=servers, session_timeout=4.0)

    def run(number: int) -> None:
        stopping = threading.Event()
        reach = Reach(settings, 2.0)
        producers = ShardProducers(settings, UUID(int=1), stopping, reach)
        chance = random.Random(f"{os.getpid()} {number}")
        while time.monotonic() < until:
            fence(producers, topics.split(","), chance)
        producers.close()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(_SENDERS)]
    for thread in threads:
        thread.start()
    say("started")
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
