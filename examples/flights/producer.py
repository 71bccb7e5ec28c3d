"""The source of the topic ``flights``; in real life, a foreign system."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from confluent_kafka import Producer
from pydantic import TypeAdapter

from examples.flights.flights import Flight

if TYPE_CHECKING:
    from collections.abc import Callable


def produce_flights(
    flights: list[Flight], kafka: str, seconds: float, tell: Callable[[], None]
) -> None:
    """Send the flights to their topic, evenly over some seconds."""
    producer = Producer(
        {
            "bootstrap.servers": kafka,
            # Java's choice of a partition: jobs_lib computes origins with it.
            "partitioner": "murmur2_random",
            "enable.idempotence": True,
            "log_level": 3,  # errors only: a broker that has just started makes noise
        }
    )
    encode = TypeAdapter(Flight).dump_json
    begun = time.monotonic()
    for number, flight in enumerate(flights):
        early = begun + seconds * number / len(flights) - time.monotonic()
        if early > 0.05:
            time.sleep(early)
        while len(producer) > 10_000:
            producer.poll(0.1)  # the broker is behind
        producer.produce("flights", key=flight.key, value=encode(flight))
        producer.poll(0)
        tell()
    producer.flush()
