"""The configuration of Kafka's clients: safe settings, and all keys that you give.

Every key you give is passed to every client unchanged; librdkafka ignores keys meant
for another kind of client. Keys that would lose records are refused, and so are keys
that follow from one of this library's settings.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import ConfigurationError
from jobs_lib.settings import require_bootstrap_servers

if TYPE_CHECKING:
    from jobs_lib.settings import Settings

Configuration = dict[str, Any]

FORCED_CONSUMER: Configuration = {
    # Offsets are committed after the database, never by a timer.
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # Where no record has the wanted offset, the consumer decides, and says so.
    "auto.offset.reset": "error",
    # The relay's blocks are Kafka transactions: an aborted one must not be seen.
    "isolation.level": "read_committed",
}
FORCED_PRODUCER: Configuration = {
    # Java's partitioner: librdkafka's own default agrees with it on a quarter of keys.
    "partitioner": "murmur2_random",
    "acks": "all",
    "enable.idempotence": True,
}
_NEW_PROTOCOL = 0x020F0000
"""The version of librdkafka, 2.15, from which on its new group protocol can be used."""
_FORCED = FORCED_CONSUMER | FORCED_PRODUCER
_ALIASES = {"auto.commit.enable": "enable.auto.commit", "request.required.acks": "acks"}
"""librdkafka's other names of forced keys."""
OURS = {
    "bootstrap.servers": "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS",
    "metadata.broker.list": "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS",
    # A sidecar finds its service's member by this id.
    "client.id": "JOBS_LIB_POD",
    "group.protocol": "JOBS_LIB_GROUP_PROTOCOL",
    "session.timeout.ms": "JOBS_LIB_SESSION_TIMEOUT",
    "heartbeat.interval.ms": "JOBS_LIB_GROUP_HEARTBEAT_INTERVAL",
    "partition.assignment.strategy": "JOBS_LIB_ASSIGNMENT_STRATEGY",
    # Half the session timeout: a hanging relay gives up before another one has its
    # shards. A publish to a stream has a time limit of its own.
    "message.timeout.ms": "JOBS_LIB_SESSION_TIMEOUT or JOBS_LIB_PUBLISH_TIMEOUT",
    "delivery.timeout.ms": "JOBS_LIB_SESSION_TIMEOUT or JOBS_LIB_PUBLISH_TIMEOUT",
    "transaction.timeout.ms": "JOBS_LIB_SESSION_TIMEOUT",
}
"""Keys that follow from one of this library's settings."""
MADE = {
    "group.id": "the declaration of a consumer gives it",
    "transactional.id": "each shard of the outbox has its own",
}
_LARGEST_BY_DEFAULT = 1_000_000
"""Bytes of the largest message that librdkafka sends by default."""
_CODE = re.compile(r"_cb$|^(logger|default\.topic\.config|on_delivery|on_commit)$")
"""Keys whose value is a Python object."""


def configure(settings: Settings) -> Configuration:
    """Make the configuration that all clients share.

    Raises:
        ConfigurationError: no broker is set, or a setting would be unsafe.
    """
    # A client connects to the address that it has, and then to the broker of which it
    # learns there. Half of this time lies between both.
    configuration: Configuration = {"reconnect.backoff.ms": 20}
    for key, value in settings.kafka.items():
        _refuse(key, value)
        if _ALIASES.get(key, key) not in _FORCED:
            configuration[key] = value
    return configuration | {
        "bootstrap.servers": require_bootstrap_servers(settings),
        "client.id": settings.pod,
    }


def configure_consumer(settings: Settings, group: str) -> Configuration:
    """Make the configuration of a consumer of ``group``.

    With the new group protocol (KIP-848) the broker sets the timeouts and the assignor:
    it refuses a client that sets its own.
    """
    configuration: Configuration = {
        # New partitions are found this late at most; the default is five minutes.
        "topic.metadata.refresh.interval.ms": 30_000,
        # What librdkafka fetches ahead, beside what waits in the consumer's memory.
        # News of the group stand behind it in the same queue.
        "queued.max.messages.kbytes": 8_192,
        # For each partition. They come compressed, and may be ten times as large then.
        "fetch.message.max.bytes": 131_072,
        "fetch.max.bytes": 1_048_576,
        # Once there is room again, the next fetch must not wait a whole second.
        "fetch.queue.backoff.ms": 10,
    }
    if settings.group_protocol == "consumer":
        _check_version()
    configuration |= configure(settings) | {
        "group.id": group,
        "group.protocol": settings.group_protocol,
    }
    if settings.group_protocol == "classic":
        configuration |= {
            "session.timeout.ms": int(settings.session_timeout * 1000),
            "heartbeat.interval.ms": int(settings.group_heartbeat_interval * 1000),
            "partition.assignment.strategy": settings.assignment_strategy,
        }
    if settings.static_membership:
        configuration["group.instance.id"] = settings.pod
    return configuration | FORCED_CONSUMER


def assigns_one_by_one(settings: Settings) -> bool:
    """Whether a group gives its members partitions one by one, or all at once."""
    return (
        settings.assignment_strategy == "cooperative-sticky"
        or settings.group_protocol == "consumer"
    )


def _check_version() -> None:
    """Refuse the new group protocol where the client is too old for it.

    Raises:
        ConfigurationError: it is.
    """
    from confluent_kafka import libversion

    name, number = libversion()
    if number < _NEW_PROTOCOL:
        raise ConfigurationError(
            "JOBS_LIB_GROUP_PROTOCOL=consumer needs confluent-kafka 2.15 or newer, and "
            f"its librdkafka is {name}: install a newer one, or leave the setting out"
        )


def configure_producer(
    settings: Settings, transactional_id: str, timeout: float, largest: int = 0
) -> Configuration:
    """Make the configuration of a transactional producer; ``timeout`` is in seconds.

    ``largest`` is the number of bytes that the declared topics allow in a message.
    """
    return (
        # A block's commit flushes at once, so batches may fill up before it. Many
        # small batches cost the broker and the client more than anything else.
        {"linger.ms": 50}
        | _configure_sender(settings, timeout, largest)
        | {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": int(timeout * 1000),
        }
        | FORCED_PRODUCER
    )


def configure_publisher(
    settings: Settings, acks: str, timeout: float, largest: int = 0
) -> Configuration:
    """Make the configuration of a producer whose callers wait for each event.

    Below ``acks=all`` idempotence is off: Kafka has no such producer.
    """
    return (
        # Callers wait. Those that come meanwhile fill the next batch.
        {"linger.ms": 0}
        | _configure_sender(settings, timeout, largest)
        | FORCED_PRODUCER
        | {"acks": acks, "enable.idempotence": acks == "all"}
    )


def _configure_sender(
    settings: Settings, timeout: float, largest: int
) -> Configuration:
    configuration: Configuration = {
        "compression.type": "lz4",
        # A missing topic then fails as missing, and not by a timeout.
        "topic.metadata.propagation.max.ms": int(timeout * 250),
    }
    if largest > _LARGEST_BY_DEFAULT:
        # Otherwise the client would refuse messages that the topic accepts.
        configuration["message.max.bytes"] = largest
    configuration |= configure(settings)
    return configuration | {"message.timeout.ms": int(timeout * 1000)}


def _refuse(key: str, value: str) -> None:
    forced = _FORCED.get(_ALIASES.get(key, key))
    if forced is not None and value.lower() != str(forced).lower():
        raise ConfigurationError(
            f"the Kafka setting {key}={value} is refused: jobs_lib needs "
            f"{key}={forced} to lose nothing. Remove it from JOBS_LIB_KAFKA"
        )
    if key in OURS:
        raise ConfigurationError(
            f"the Kafka setting {key} follows from {OURS[key]}: set that one, and "
            f"remove {key} from JOBS_LIB_KAFKA"
        )
    if key in MADE:
        raise ConfigurationError(
            f"the Kafka setting {key} cannot be chosen, as {MADE[key]}: remove it from "
            "JOBS_LIB_KAFKA"
        )
    if _CODE.search(key):
        raise ConfigurationError(
            f"the Kafka setting {key} is a Python object, which no setting can be: "
            "remove it from JOBS_LIB_KAFKA"
        )
