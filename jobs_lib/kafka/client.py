"""Make consumers, producers and admin clients in the one way that is safe."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from jobs_lib import telemetry
from jobs_lib.errors import AccessError, ConfigurationError
from jobs_lib.kafka.configuration import (
    configure,
    configure_consumer,
    configure_producer,
    configure_publisher,
)
from jobs_lib.kafka.refusal import OF_TOPIC, find_refusal, find_tls_fault, no_answer
from jobs_lib.masking import PlainRecords, mask

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jobs_lib.kafka.configuration import Configuration
    from jobs_lib.settings import Settings

_logger = logging.getLogger("jobs_lib.kafka")
OnRefused = Callable[[AccessError], None]
"""Called each time the brokers refuse a client that tries to connect."""
OnCommit = Callable[[KafkaError | None, list[TopicPartition]], None]
Client = TypeVar("Client", Consumer, Producer, AdminClient)
_LINE = re.compile(r"(\w+) \[[^]]*\] \[thrd:([^]]*)\]: ")
"""The beginning of a log line: kind, client, and thread, one for each broker."""
_OF_CONNECTIONS = {"FAIL", "ERROR"}
_WAITS = (0.1, 0.3, 0.6)
_AT_ONCE_MS = 5
_FIND_SECONDS = 0.5
"""No longer than a client would wait by itself."""
_NO_TOPIC = "/"
"""A name that no topic can have: the answer is short, and no topic is made."""


def _log(refusal: AccessError) -> None:
    _logger.error("%s", refusal)


def make_consumer(
    settings: Settings,
    group: str,
    on_refused: OnRefused = _log,
    on_commit: OnCommit | None = None,
    *,
    reports_ends: bool = False,
    waits_at_end: bool = True,
    joins: bool = True,
    sees_uncommitted: bool = False,
) -> Consumer:
    """Make a consumer of ``group`` whose client id is the pod's name.

    Args:
        settings: where the brokers are.
        group: the consumer group.
        on_refused: called when the brokers refuse the client.
        on_commit: called with the result of each commit of offsets.
        reports_ends: whether polls return an error where a partition ends.
        waits_at_end: whether the broker may keep a request back while there is nothing
            new. A client that goes elsewhere then waits for that answer first.
        joins: whether it may become a member; if not, it has no member's name.
        sees_uncommitted: whether it counts what transactions may still take back.

    Raises:
        ConfigurationError: a setting is unknown, or would be unsafe.
    """
    configuration = configure_consumer(settings, group)
    if reports_ends:
        configuration["enable.partition.eof"] = True
    if not waits_at_end:
        configuration["fetch.wait.max.ms"] = _AT_ONCE_MS
    if not joins:
        configuration.pop("group.instance.id", None)
    if sees_uncommitted:
        configuration["isolation.level"] = "read_uncommitted"
    if on_commit is not None:
        configuration["on_commit"] = on_commit
    return _make(Consumer, configuration, settings, _on_error(settings, on_refused))


def make_producer(
    settings: Settings,
    transactional_id: str,
    timeout: float,
    on_refused: OnRefused = _log,
    *,
    largest: int = 0,
) -> Producer:
    """Make a transactional producer; the broker refuses older ones of the same id.

    Args:
        settings: where the brokers are.
        transactional_id: stable over restarts and take-overs.
        timeout: seconds until an unsent record is given up and its row sent again.
        on_refused: called when the brokers refuse the client.
        largest: bytes that a message may have; 0 leaves that to the client.

    Raises:
        ConfigurationError: a setting is unknown, or would be unsafe.
    """
    configuration = configure_producer(settings, transactional_id, timeout, largest)
    return _make(Producer, configuration, settings, _on_error(settings, on_refused))


def init_transactions(producer: Producer, timeout: float) -> KafkaError | None:
    """Take a producer's transactional id over; returns the error if that fails.

    An error that is raised would keep the producer in memory for as long as itself.
    """
    find_broker(producer, timeout)
    try:
        producer.init_transactions(timeout)
    except KafkaException as failure:
        error: KafkaError = failure.args[0]
        return error
    return None


def make_publisher(
    settings: Settings,
    acks: str,
    timeout: float,
    on_refused: OnRefused = _log,
    *,
    largest: int = 0,
) -> Producer:
    """Make a producer without transactions, for callers that wait for each event.

    Args:
        settings: where the brokers are.
        acks: what must be acknowledged: ``"0"``, ``"1"`` or ``"all"``.
        timeout: seconds until an event without an acknowledgement is given up.
        on_refused: called when the brokers refuse the client.
        largest: bytes that a message may have; 0 leaves that to the client.

    Raises:
        ConfigurationError: a setting is unknown, or would be unsafe.
    """
    configuration = configure_publisher(settings, acks, timeout, largest)
    return _make(Producer, configuration, settings, _on_error(settings, on_refused))


def find_broker(client: Producer | AdminClient, timeout: float) -> None:
    """Let a new client find a broker before it asks something.

    A producer that asks for its id, or an admin client that asks for a leader, before
    it knows a broker asks again after half a second, or up to three seconds.
    """
    # It tries on by itself.
    with suppress(KafkaException):
        client.list_topics(_NO_TOPIC, timeout=min(timeout, _FIND_SECONDS))


def find_leaders(consumer: Consumer, places: Iterable[TopicPartition]) -> None:
    """Let a new consumer know the leaders of partitions, before they are assigned.

    A consumer that knows none waits for half a second before it asks what the oldest
    offset is. This question, of any time, makes it ask for the leaders at once. Where
    an offset is given, it does not wait.
    """
    asked = [
        TopicPartition(at.topic, at.partition, 0) for at in places if at.offset < 0
    ]
    if asked:
        # It tries on by itself.
        with suppress(KafkaException):
            consumer.offsets_for_times(asked, timeout=_FIND_SECONDS)


def make_admin(settings: Settings, on_refused: OnRefused = _log) -> AdminClient:
    """Make an admin client.

    Raises:
        ConfigurationError: a setting is unknown, or would be unsafe.
    """
    configuration = configure(settings)
    return _make(AdminClient, configuration, settings, _on_error(settings, on_refused))


def poll_events(client: Consumer | Producer | AdminClient) -> None:
    """Poll a client so that it runs its callbacks, which it does only when polled.

    Otherwise its events would pile up. A fatal error is raised by the next call again.
    """
    with suppress(KafkaException):
        cast("Any", client).poll(0)


def flush(producer: Producer, timeout: float) -> None:
    """Wait until all that a producer has sent is answered, ``timeout`` seconds at most.

    A fatal error, which is told once, would end the wait.
    """
    until = time.monotonic() + timeout
    while len(producer) and (left := until - time.monotonic()) > 0:
        with suppress(KafkaException):
            producer.flush(left)


def find_cause(producer: Producer, error: KafkaError) -> KafkaError:
    """Find out why a transaction failed where the error only says that it did.

    Kafka may refuse what was put into a transaction while more is put in. The client
    then calls the producer's state wrong, and only the next begin tells why.
    """
    if error.code() != KafkaError._STATE:
        return error
    try:
        producer.begin_transaction()
    except KafkaException as failure:
        cause: KafkaError = failure.args[0]
        return cause
    return error


def check_settings(settings: Settings) -> None:
    """Refuse settings that Kafka's clients do not know, without asking a broker.

    Raises:
        ConfigurationError: a setting is unknown, or would be unsafe.
    """
    # Each kind of client has rules of its own for combinations of settings.
    make_admin(settings)
    make_consumer(settings, "check")
    make_producer(settings, "check", settings.session_timeout)


def count_partitions(settings: Settings, topic: str, timeout: float = 5.0) -> int:
    """Count a topic's partitions; 0 if it does not exist or is not visible.

    Raises:
        AccessError: the brokers do not let it in, or cannot be trusted.
        UnavailableError: no broker answers within ``timeout`` seconds.
    """
    return list_partitions(settings, [topic], timeout)[topic]


def read_topics(settings: Settings, timeout: float = 5.0) -> dict[str, Any]:
    """Read the metadata of all topics that this client may see, by name.

    Raises:
        AccessError: the brokers do not let it in, or cannot be trusted.
        UnavailableError: no broker answers within ``timeout`` seconds.
    """
    errors: list[KafkaError] = []
    admin = _make(AdminClient, configure(settings), settings, errors.append)
    text = ""
    # Short waits first: librdkafka goes on trying even when it is refused.
    for share in _WAITS:
        try:
            return cast(
                "dict[str, Any]", admin.list_topics(timeout=share * timeout).topics
            )
        except KafkaException as error:
            text = error.args[0].str()
        poll_events(admin)
        refusals = (find_refusal(one, settings) for one in errors)
        refusal = next((one for one in refusals if one is not None), None)
        if (fault := find_tls_fault(settings) or refusal) is not None:
            raise fault
    texts = [e.str() for e in errors if e.code() != KafkaError._ALL_BROKERS_DOWN]
    raise no_answer(settings, [text, *texts][-1], f" within {timeout:g} s")


def list_partitions(
    settings: Settings, topics: Iterable[str], timeout: float = 5.0
) -> dict[str, int]:
    """Count the partitions of topics; 0 for topics that are missing or not visible.

    Raises:
        AccessError: the brokers do not let it in, or cannot be trusted.
        UnavailableError: no broker answers within ``timeout`` seconds.
    """
    there = read_topics(settings, timeout)
    found = {topic: there.get(topic) for topic in topics}
    return {
        topic: 0 if one is None or one.error is not None else len(one.partitions)
        for topic, one in found.items()
    }


def read_topic_ids(
    settings: Settings,
    topics: Iterable[str],
    timeout: float = 5.0,
    client: AdminClient | None = None,
) -> dict[str, UUID]:
    """Read the ids of topics. One that is deleted and made anew has another id.

    Topics that are missing or not visible are left out, and all topics of a broker that
    knows no ids.

    Args:
        settings: where Kafka is.
        topics: by their names in Kafka.
        timeout: seconds.
        client: asks; None for one that is made for this question.

    Raises:
        AccessError: the brokers do not let it in.
        UnavailableError: no broker answers within ``timeout`` seconds.
    """
    # Keep the client until the answers are there: a deleted client gives none.
    admin = cast("Any", client or make_admin(settings))
    asked = TopicCollection(list(topics))
    ids: dict[str, UUID] = {}
    for topic, future in admin.describe_topics(asked, request_timeout=timeout).items():
        try:
            found = future.result().topic_id
        except KafkaException as error:
            failure: KafkaError = error.args[0]
            if failure.code() in OF_TOPIC:
                continue
            # Whatever else it is, the topic may be there.
            refusal = find_refusal(failure, settings, topic, "DESCRIBE")
            told = no_answer(settings, failure.str(), f" for {topic!r}")
            raise refusal or told from None
        if (id_ := as_uuid(found)) is not None:
            ids[topic] = id_
    return ids


def as_uuid(found: Any) -> UUID | None:
    """Turn the id of a topic into a UUID; None if the broker knows no ids."""
    bits = found.get_most_significant_bits(), found.get_least_significant_bits()
    high, low = (one & 0xFFFF_FFFF_FFFF_FFFF for one in bits)
    return UUID(int=high << 64 | low) if high or low else None


def create_topic(
    admin: AdminClient,
    name: str,
    partitions: int,
    config: Mapping[str, str],
    *,
    replication: int = -1,
) -> bool:
    """Create a topic; returns False if it exists already."""
    topic = NewTopic(name, partitions, replication, config=dict(config))
    future = admin.create_topics([topic], request_timeout=10)[name]
    try:
        future.result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return False
        raise
    return True


def _on_error(
    settings: Settings, on_refused: OnRefused
) -> Callable[[KafkaError], None]:
    def on_error(error: KafkaError) -> None:
        # librdkafka logs all other errors itself, and less often than it calls this.
        if (refusal := find_refusal(error, settings)) is not None:
            on_refused(refusal)

    return on_error


def _make(
    kind: Callable[..., Client],
    configuration: Configuration,
    settings: Settings,
    on_error: Callable[[KafkaError], None],
) -> Client:
    try:
        return kind(configuration | {"error_cb": on_error}, logger=_logger)
    except KafkaException as error:
        text = mask(error.args[0].str())
        for value in settings.kafka.values():
            # A value may be a secret that was given under the wrong key.
            text = text.replace(f'"{value}"', '"…"')
        given = ", ".join(sorted(settings.kafka)) or "none"
        raise ConfigurationError(
            f"Kafka's client refuses its settings: {text}. Those given in "
            f"JOBS_LIB_KAFKA are: {given}. Is one of them misspelt?"
        ) from None


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log line of librdkafka says something that this library does not.

    librdkafka writes a line for each client and attempt. If no broker answers at the
    address that was set, whatever waits for it reports that with the way out.
    """
    text = record.getMessage()
    # Every client gets every key, so keys for other kinds of clients are no news.
    if "and will be ignored by this" in text:
        return False
    found = _LINE.match(text)
    if found is None:
        return True
    kind, broker = found.groups()
    # The coordinator has just started. If this lasts, the relay's shard fails.
    if kind == "GETPID" and text.endswith("retrying"):
        return False
    if kind not in _OF_CONNECTIONS:
        return True
    return not broker.endswith("/bootstrap") and not telemetry.is_recent(broker)


_logger.addFilter(_is_news)
_logger.addFilter(PlainRecords())
