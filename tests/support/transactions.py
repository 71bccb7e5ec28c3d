"""Transactions of Kafka that are open while something else happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from confluent_kafka import Producer

from jobs_lib.kafka import places

if TYPE_CHECKING:
    import pytest


def open_transaction(
    bootstrap_servers: str, topic: str, partitions: int, first: int = 0
) -> Producer:
    """Open a transaction with one record in each partition; the caller ends it."""
    producer = Producer(
        {"bootstrap.servers": bootstrap_servers, "transactional.id": f"open-{uuid4()}"}
    )
    producer.init_transactions(60)
    producer.begin_transaction()
    for number in range(first, first + partitions):
        producer.produce(topic, b"{}", key="open", partition=number)
    assert producer.flush(30) == 0
    return producer


def abort_when_waited_for(monkeypatch: pytest.MonkeyPatch, producer: Producer) -> None:
    """Abort a transaction at the third question for the committed ends."""
    ask, asked = places.find_committed_ends, []

    def find_ends(*given: Any) -> dict[int, int]:
        asked.append(given)
        if len(asked) == 3:
            producer.abort_transaction(60)
        return ask(*given)

    monkeypatch.setattr(places, "find_committed_ends", find_ends)
