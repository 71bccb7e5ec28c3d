"""The service whose outbox is relayed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException, Producer

from jobs_lib import App
from jobs_lib.outbox import relay
from jobs_lib.outbox.block import make_messages
from jobs_lib.outbox.producers import ShardProducers

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.outbox.block import Records, Refusal

app = App("bench")
events = app.topic(os.environ.get("BENCH_TOPIC", "bench"), value=bytes, partitions=8)


class IdempotentProducers(ShardProducers):
    """Producers without transactions: nothing stops a stale one from sending."""

    def _make(self, shard: int) -> Producer:
        return Producer(
            {
                "bootstrap.servers": self._settings.kafka_bootstrap_servers,
                "enable.idempotence": True,
                "acks": "all",
                "partitioner": "murmur2_random",
                "compression.type": "lz4",
                "linger.ms": 2,
            }
        )

    def send(
        self, shard: int, records: Records, confirm: Callable[[], None]
    ) -> tuple[Records, list[Refusal]]:
        """Send, and wait until Kafka has acknowledged all."""
        producer = self._made[shard]
        failed: list[Any] = []

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(error)

        for topic, value, key, headers in make_messages(records):
            while True:
                try:
                    producer.produce(
                        topic, value, key, headers=headers, on_delivery=delivered
                    )
                    break
                except BufferError:
                    producer.poll(0.05)
        producer.flush(self._timeout)
        if failed:
            raise KafkaException(failed[0])
        return records, []


if os.environ.get("BENCH_IDEMPOTENT"):
    relay.ShardProducers = IdempotentProducers  # type: ignore[attr-defined]
