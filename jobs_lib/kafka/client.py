"""Consumers, producers and admin clients, set up the one way that is safe."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from jobs_lib.errors import ConfigurationError, UnavailableError
from jobs_lib.settings import require_bootstrap_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from jobs_lib.settings import Settings

_logger = logging.getLogger("jobs_lib.kafka")
_NO_ANSWER = {
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
}
# So late are new partitions of a topic found; librdkafka's own default is five minutes.
_REFRESHED = {"topic.metadata.refresh.interval.ms": 30_000}
_FORCED: dict[str, str | int | bool] = {
    # Offsets are committed after the database, never by a timer.
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # Java's partitioner: librdkafka's own default agrees with it on a quarter of keys.
    "partitioner": "murmur2_random",
    "acks": "all",
    "enable.idempotence": True,
    # The relay's blocks are Kafka transactions: an aborted one must not be seen.
    "isolation.level": "read_committed",
}
_CONSUMER_KEYS = {"enable.auto.commit", "enable.auto.offset.store", "isolation.level"}
_PRODUCER_KEYS = {"partitioner", "acks", "enable.idempotence"}


def make_consumer(settings: Settings, group: str) -> Consumer:
    """A consumer of ``group`` whose client id is the pod's name.

    Of the new group protocol (KIP-848) the timeouts and the assignor are the broker's:
    a client that sets its own is refused.

    Raises:
        ConfigurationError: a setting is unknown, or would be unsafe.
    """
    configuration = (
        _REFRESHED
        | _common(settings)
        | {
            "group.id": group,
            "auto.offset.reset": "earliest",
            "group.protocol": settings.group_protocol,
        }
    )
    if settings.group_protocol == "classic":
        configuration |= {
            "session.timeout.ms": int(settings.session_timeout * 1000),
            "heartbeat.interval.ms": int(settings.group_heartbeat_interval * 1000),
            "partition.assignment.strategy": settings.assignment_strategy,
        }
    if settings.static_membership:
        configuration["group.instance.id"] = settings.pod
    configuration |= {key: _FORCED[key] for key in _CONSUMER_KEYS}
    return cast("Consumer", _make(Consumer, configuration, settings))


def make_producer(
    settings: Settings, transactional_id: str, timeout: float
) -> Producer:
    """A transactional producer; the broker refuses any older one of the same id.

    Args:
        settings: where the brokers are.
        transactional_id: stable over restarts and take-overs.
        timeout: seconds until an unsent record is given up and its row sent again.
    """
    configuration = _common(settings) | {
        "transactional.id": transactional_id,
        "transaction.timeout.ms": int(timeout * 1000),
        "message.timeout.ms": int(timeout * 1000),
        # Blocks are flushed by their commit: waiting for company only adds latency.
        "linger.ms": 2,
        "compression.type": "lz4",
        # A topic that is not there fails for that, and not for want of time.
        "topic.metadata.propagation.max.ms": int(timeout * 250),
    }
    configuration |= {key: _FORCED[key] for key in _PRODUCER_KEYS}
    return cast("Producer", _make(Producer, configuration, settings))


def check_settings(settings: Settings) -> None:
    """Refuse what Kafka's client does not know, without asking a broker.

    Raises:
        ConfigurationError: a setting is unknown, or would be unsafe.
    """
    make_admin(settings)


def make_admin(settings: Settings) -> AdminClient:
    """An admin client."""
    return cast("AdminClient", _make(AdminClient, _common(settings), settings))


def count_partitions(settings: Settings, topic: str, timeout: float = 5.0) -> int:
    """How many partitions a topic has; 0 where it does not exist.

    Raises:
        UnavailableError: no broker answers within ``timeout`` seconds.
    """
    return list_partitions(settings, [topic], timeout)[topic]


def list_partitions(
    settings: Settings, topics: Iterable[str], timeout: float = 5.0
) -> dict[str, int]:
    """How many partitions topics have; 0 for those that do not exist.

    Raises:
        UnavailableError: no broker answers within ``timeout`` seconds.
    """
    try:
        there = make_admin(settings).list_topics(timeout=timeout).topics
    except KafkaException as error:
        raise UnavailableError(
            f"no Kafka broker at {settings.kafka_bootstrap_servers} answers within "
            f"{timeout:g} s: {error.args[0].str()}. Is it running, and is "
            "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS right?"
        ) from None
    found = {topic: there.get(topic) for topic in topics}
    return {
        topic: 0 if one is None or one.error is not None else len(one.partitions)
        for topic, one in found.items()
    }


def read_ends(
    settings: Settings, partitions: Iterable[str], timeout: float = 5.0
) -> dict[str, int]:
    """The offsets that the next records of partitions will have.

    Args:
        settings: where Kafka is.
        partitions: such as ``orders/7``; those that do not exist are left out.
        timeout: seconds.

    Raises:
        UnavailableError: no broker answers in time.
    """
    asked: dict[TopicPartition, Any] = {}
    latest = cast("Any", OffsetSpec).latest()
    for name in partitions:
        topic, _, number = name.rpartition("/")
        asked[TopicPartition(topic, int(number))] = latest
    ends = {}
    # Held until the answers are there: a client that is gone gives none.
    admin = make_admin(settings)
    found = admin.list_offsets(asked, request_timeout=timeout)
    for partition, future in found.items():
        try:
            offset = future.result().offset
        except KafkaException as error:
            if error.args[0].code() not in _NO_ANSWER:
                continue
            raise UnavailableError(
                f"no Kafka broker at {settings.kafka_bootstrap_servers} tells how far "
                f"{partition.topic!r} goes: {error.args[0].str()}"
            ) from None
        ends[f"{partition.topic}/{partition.partition}"] = offset
    return ends


def create_topic(
    admin: AdminClient,
    name: str,
    partitions: int,
    config: Mapping[str, str],
    *,
    replication: int = -1,
) -> bool:
    """Create a topic; False where it exists already."""
    topic = NewTopic(name, partitions, replication, config=dict(config))
    future = admin.create_topics([topic], request_timeout=10)[name]
    try:
        future.result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return False
        raise
    return True


def _common(settings: Settings) -> dict[str, Any]:
    for key, value in settings.kafka.items():
        forced = _FORCED.get(key)
        if forced is not None and value.lower() != str(forced).lower():
            raise ConfigurationError(
                f"the Kafka setting {key}={value} is refused: jobs_lib needs "
                f"{key}={forced} to lose nothing. Remove it from JOBS_LIB_KAFKA"
            )
    own = {
        "bootstrap.servers": require_bootstrap_servers(settings),
        "client.id": settings.pod,
    }
    return own | {k: v for k, v in settings.kafka.items() if k not in _FORCED}


def _make(
    kind: Callable[..., Any], configuration: dict[str, Any], settings: Settings
) -> Any:
    try:
        return kind(configuration, logger=_logger)
    except KafkaException as error:
        # librdkafka's text may repeat a value: name the keys only.
        given = ", ".join(sorted(settings.kafka)) or "none"
        code = error.args[0].name()
        raise ConfigurationError(
            f"Kafka's client refuses its settings ({code}); those given in "
            f"JOBS_LIB_KAFKA are: {given}. Is one of them misspelt?"
        ) from None
