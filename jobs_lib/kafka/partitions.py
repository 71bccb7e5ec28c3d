"""Add partitions to a topic, and see whether each broker knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

from jobs_lib.kafka.client import make_admin
from jobs_lib.kafka.refusal import SILENT, explain_failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.settings import Settings

_ARE_THERE = KafkaError.INVALID_PARTITIONS
"""The topic has so many or more: the broker that was asked before was behind."""
ADD_SECONDS = 5.0
"""How long a broker may take to add partitions."""
_SECONDS = 2.0
"""How long a broker may take to show its partitions."""


def add_partitions(settings: Settings, topic: str, count: int) -> None:
    """Add partitions to a topic until it has so many.

    It returns likewise if no broker answers in time, when nobody knows whether they are
    there, and if they are there already.

    Raises:
        AccessError: Kafka does not let this client in, or denies it the right.
        TopicError: it refuses to add them.
    """
    # Keep the client until the answer is there: a deleted client gives none.
    admin = make_admin(settings)
    asked = admin.create_partitions(
        [NewPartitions(topic, count)], request_timeout=ADD_SECONDS
    )
    try:
        asked[topic].result()
    except KafkaException as failure:
        error = failure.args[0]
        if error.code() in SILENT or error.code() == _ARE_THERE:
            return
        told = f"no partitions can be added to the topic {topic!r}"
        raise explain_failed(error, settings, topic, "ALTER", told) from None


def count_on_brokers(
    settings: Settings,
    topic: str,
    before_each: Callable[[], object] = lambda: None,
) -> dict[str, int]:
    """Count the partitions with a leader that each live broker shows of a topic.

    Args:
        settings: where Kafka is.
        topic: by its name in Kafka.
        before_each: is called before each broker is asked.

    Returns the counts by the brokers' addresses; 0 for one that does not answer.
    """
    try:
        addresses = _list_brokers(settings)
    except KafkaException:
        return {settings.kafka_bootstrap_servers: 0}
    counts = {}
    for one in addresses:
        before_each()
        counts[one] = _count_on(settings, topic, one)
    return counts


def _list_brokers(settings: Settings) -> list[str]:
    brokers = make_admin(settings).list_topics(timeout=_SECONDS).brokers.values()
    return [f"{one.host}:{one.port}" for one in brokers]


def _count_on(settings: Settings, topic: str, address: str) -> int:
    # A client's first question goes to the only broker that it knows.
    own = settings.model_copy(update={"kafka_bootstrap_servers": address})
    try:
        found = make_admin(own).list_topics(topic, timeout=_SECONDS).topics[topic]
    except KafkaException:
        return 0
    return sum(1 for one in found.partitions.values() if one.leader >= 0)
