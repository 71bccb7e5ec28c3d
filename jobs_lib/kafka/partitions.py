"""Add partitions to a topic, and see whether each broker knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import KafkaException
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

from jobs_lib.kafka.client import NO_ANSWER, make_admin
from jobs_lib.kafka.refusal import explain_failed

if TYPE_CHECKING:
    from jobs_lib.settings import Settings

ADD_SECONDS = 5.0
"""How long a broker may take to add partitions."""


def add_partitions(settings: Settings, topic: str, count: int) -> None:
    """Add partitions to a topic until it has so many.

    If no broker answers in time, it returns likewise: nobody knows then whether they
    are there.

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
        if error.code() in NO_ANSWER:
            return
        told = f"no partitions can be added to the topic {topic!r}"
        raise explain_failed(error, settings, topic, "ALTER", told) from None


def count_on_brokers(
    settings: Settings, topic: str, timeout: float = 2.0
) -> dict[str, int]:
    """Count the partitions with a leader that each live broker shows of a topic.

    Returns the counts by the brokers' addresses; 0 for one that does not answer.
    """
    try:
        brokers = make_admin(settings).list_topics(timeout=timeout).brokers.values()
    except KafkaException:
        return {settings.kafka_bootstrap_servers: 0}
    addresses = [f"{one.host}:{one.port}" for one in brokers]
    return {one: _count_on(settings, topic, one, timeout) for one in addresses}


def _count_on(settings: Settings, topic: str, address: str, timeout: float) -> int:
    # A client's first question goes to the only broker that it knows.
    own = settings.model_copy(update={"kafka_bootstrap_servers": address})
    try:
        found = make_admin(own).list_topics(topic, timeout=timeout).topics[topic]
    except KafkaException:
        return 0
    return sum(1 for one in found.partitions.values() if one.leader >= 0)
