"""Find offsets of partitions: where they begin and end, and where a time begins."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, cast

from confluent_kafka import (
    IsolationLevel,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    ConfigResource,
    OffsetSpec,
    ResourceType,
)

from jobs_lib.errors import (
    AccessError,
    OffsetError,
    OperatingError,
    UnavailableError,
)
from jobs_lib.kafka.client import (
    find_broker,
    list_partitions,
    make_admin,
    make_consumer,
    read_topics,
)
from jobs_lib.kafka.members import delete_groups
from jobs_lib.kafka.reader import PartsReader, Span
from jobs_lib.kafka.refusal import SILENT, SOON, explain_failed, missing_topics
from jobs_lib.partitioner import split_origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from confluent_kafka import Consumer

    from jobs_lib.settings import Settings

_SPECS = cast("Any", OffsetSpec)
_CONFIG_SECONDS = 10.0
_PAUSE = 0.1
_PATIENCE = 10.0
"""Seconds in which a partition gets a leader."""
_SETTLED_SECONDS = 60.0
"""Kafka ends the transaction of a relay that died sooner, unless a setting differs."""
_LOOK_SECONDS = 5.0
"""How long a look for records waits for Kafka, or for a transaction that is open."""


def read_ends(
    settings: Settings,
    partitions: Iterable[str],
    timeout: float = 5.0,
    *,
    committed: bool = False,
) -> dict[str, int]:
    """Read the offsets that the next records of partitions will have.

    Args:
        settings: where Kafka is.
        partitions: such as ``orders/7``; those that do not exist are left out.
        timeout: seconds.
        committed: whether an open transaction ends one before its first record.

    Raises:
        UnavailableError: no broker answers in time.
    """
    asked = [TopicPartition(*split_origin(one)) for one in partitions]
    latest = _SPECS.latest()
    found = _list_offsets(settings, asked, latest, timeout, committed=committed)
    return {f"{one.topic}/{one.partition}": offset for one, offset in found.items()}


def find_places(
    settings: Settings, topic: str, at: Literal["start", "end"] | datetime
) -> dict[int, int]:
    """Find the offset of each partition of a topic at its start, its end, or a time.

    That of a time is the offset of the first record of this time or later in Kafka. It
    is the end, where there is none.

    Raises:
        AccessError: the brokers do not let this client in.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers in time.
    """
    spec = _SPECS.earliest() if at == "start" else _SPECS.latest()
    found = _list_all(settings, topic, spec)
    if isinstance(at, datetime):
        # Kafka takes negative times for its own ends, or answers nothing.
        milliseconds = max(0, round(at.timestamp() * 1000))
        then = _list_all(settings, topic, _SPECS.for_timestamp(milliseconds))
        # Kafka gives a negative offset where no record is as new as that.
        found.update({one: offset for one, offset in then.items() if offset >= 0})
    return {one.partition: offset for one, offset in found.items()}


def find_committed_ends(settings: Settings, topic: str) -> dict[int, int]:
    """Find the ends of a topic's partitions for consumers of committed records.

    A transaction that is open ends them before its first record.

    Raises:
        AccessError: the brokers do not let this client in.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers in time.
    """
    found = _list_all(settings, topic, _SPECS.latest(), committed=True)
    return {one.partition: offset for one, offset in found.items()}


def find_settled_ends(
    settings: Settings, topic: str, within: float = _SETTLED_SECONDS
) -> dict[int, int]:
    """Find the ends of a topic's partitions once what is open now has ended.

    All records that are committed by now lie before them. They may lie behind the first
    record of another producer's open transaction, which hides them, or the marker of
    their own may be on its way.

    Args:
        settings: where Kafka is.
        topic: by its name in Kafka.
        within: seconds to wait.

    Raises:
        AccessError: the brokers do not let this client in.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers in time, or a transaction does not end.
    """
    written = find_places(settings, topic, "end")
    until = time.monotonic() + within
    while True:
        ends = find_committed_ends(settings, topic)
        hidden = [one for one, end in written.items() if ends.get(one, 0) < end]
        if not hidden:
            return ends
        if time.monotonic() > until:
            number = min(hidden)
            raise UnavailableError(
                f"a transaction in {topic}/{number} is open from offset "
                f"{ends.get(number, 0)} on and has not ended for {within:.0f} s, so "
                "records behind it cannot be seen: wait for it or end it "
                "(`kafka-transactions.sh find-hanging`), and try again"
            )
        time.sleep(_PAUSE)


def find_starts(
    settings: Settings,
    topic: str,
    at: Literal["start"] | int | datetime,
    partition: int | None = None,
) -> dict[int, int]:
    """Find where a topic's partitions begin that are to be read again.

    Args:
        settings: where Kafka is.
        topic: the topic's name in Kafka.
        at: the oldest record, an offset, or a time in Kafka.
        partition: only this one; None for all.

    Returns the offsets by partition.

    Raises:
        OperatingError: the partition is not there, or is missing beside an offset; or
            the record of the offset is gone.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers in time.
    """
    starts = find_places(settings, topic, "start")
    if partition is not None and partition not in starts:
        raise OperatingError(
            f"{topic}/{partition} does not exist: {topic!r} has the partitions 0 to "
            f"{len(starts) - 1}"
        )
    if not isinstance(at, int):
        found = starts if at == "start" else find_places(settings, topic, at)
        return {one: found[one] for one in found if partition in (None, one)}
    if partition is None:
        raise OperatingError(
            f"the offset {at} needs a partition (--partition): each partition has its "
            "own offsets"
        )
    if at < starts[partition]:
        raise OperatingError(
            f"{topic}/{partition} has no record before offset {starts[partition]}: "
            f"{at} is gone, by retention or a cut log"
        )
    return {partition: at}


def count_left(
    settings: Settings,
    group: str,
    topic: str,
    stored: Mapping[int, int | None] | None,
    ends: Mapping[int, int],
) -> int:
    """Count the offsets before some ends that a group has not passed.

    The arguments and errors are those of :func:`find_left`.
    """
    return count_offsets(find_left(settings, group, topic, stored, ends))


def count_offsets(parts: Mapping[int, Span]) -> int:
    """Count the offsets of parts whose starts are known."""
    return sum(one.end - (one.start or 0) for one in parts.values())


def find_left(
    settings: Settings,
    group: str,
    topic: str,
    stored: Mapping[int, int | None] | None,
    ends: Mapping[int, int],
    told: Mapping[int, int] | None = None,
) -> dict[int, Span]:
    """Find the parts of partitions before some ends that a group has not passed.

    What the database has counts. It may have gone back since Kafka was told of an end,
    by a rewind, a backup, or a server that took over. So Kafka's word counts only where
    no record lies before the end: markers of transactions, or what was compacted.

    Args:
        settings: where Kafka is.
        group: of consumers.
        topic: the topic's name in Kafka.
        stored: the offsets that they have stored in the database, by partition; None if
            only Kafka has them.
        ends: of the partitions.
        told: the offsets that the group has committed to Kafka, by partition; None to
            ask Kafka.

    Raises:
        AccessError: the brokers do not let this client in, or deny it the right to
            read the topic.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers.
    """
    starts = find_places(settings, topic, "start")
    if told is None:
        told = read_committed(settings, group, topic)
    places = told if stored is None else stored
    left = {
        number: Span(place, ends[number])
        for number, start in starts.items()
        if (place := max(start, places.get(number) or 0)) < ends.get(number, 0)
    }
    # What Kafka has of a partition that this database does not know is of an earlier
    # one.
    doubted = {
        number: span
        for number, span in left.items()
        if stored is None or (number in stored and told.get(number, 0) >= span.end)
    }
    empty = doubted.keys() - find_records(settings, group, topic, doubted)
    return {number: span for number, span in left.items() if number not in empty}


def find_records(
    settings: Settings, group: str, topic: str, spans: Mapping[int, Span]
) -> set[int]:
    """Find the partitions that have a record in their parts, or may have one.

    Consumers of committed records count; ``group`` names the client, and is not joined.

    Raises:
        AccessError: the brokers do not let this client in, or deny it the right to
            read the topic.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers.
    """
    if not spans:
        return set()
    parts = {(topic, number): span for number, span in spans.items()}
    found = set()
    try:
        with PartsReader(
            settings, parts, group, most=1, patience=_LOOK_SECONDS
        ) as reader:
            for partition, _ in reader:
                found.add(partition[1])
                reader.leave(partition)
    except OffsetError:
        # An open transaction hides what it has, or the topic has changed meanwhile.
        return {*spans}
    return found


def read_committed(
    settings: Settings, group: str, topic: str, timeout: float = 5.0
) -> dict[int, int]:
    """Read the offsets that a group has committed to Kafka, by partition.

    Partitions of which it has committed none are left out.

    Raises:
        UnavailableError: no broker answers.
    """
    found = read_commits(settings, group, topic, timeout)
    return {one.partition: one.offset for one in found if one.offset >= 0}


def read_commits(
    settings: Settings, group: str, topic: str, timeout: float = 5.0
) -> list[TopicPartition]:
    """Read what a group has committed of each partition, with its metadata.

    The offset of a partition of which it has committed none is negative.

    Raises:
        UnavailableError: no broker answers.
    """
    count = list_partitions(settings, [topic])[topic]
    asked = [TopicPartition(topic, number) for number in range(count)]
    # It never joins. The admin client's question ends the process where the group has
    # no coordinator for a moment (confluentinc/librdkafka issue 5040).
    consumer = make_consumer(settings, group)
    try:
        return _ask_committed(consumer, asked, timeout) if asked else []
    except KafkaException as error:
        raise UnavailableError(
            f"no Kafka broker at {settings.kafka_bootstrap_servers} gives the offsets "
            f"of the group {group!r}: {error.args[0].str()}"
        ) from None
    finally:
        consumer.close()


def _ask_committed(
    consumer: Consumer, asked: list[TopicPartition], timeout: float
) -> list[TopicPartition]:
    """Ask again while the group's coordinator may be on its way."""
    until = time.monotonic() + timeout
    while True:
        try:
            return consumer.committed(asked, timeout)
        except KafkaException as error:
            if error.args[0].code() not in SOON or time.monotonic() > until:
                raise
        time.sleep(_PAUSE)


def keeps_all_keys(settings: Settings, topic: str) -> bool:
    """Whether a topic keeps a record of each key: it is compacted, and nothing else.

    Raises:
        AccessError: Kafka denies the right to describe the topic's settings.
        TopicError: they cannot be read.
        UnavailableError: no broker answers.
    """
    return read_policy(settings, topic) == "compact"


def read_policy(settings: Settings, topic: str) -> str:
    """Read how a topic is cleaned up: ``compact``, ``delete``, or both with a comma.

    Raises:
        AccessError: Kafka denies the right to describe the topic's settings.
        TopicError: they cannot be read.
        UnavailableError: no broker answers.
    """
    admin = make_admin(settings)
    asked = ConfigResource(ResourceType.TOPIC, topic)
    future = admin.describe_configs([asked], request_timeout=_CONFIG_SECONDS)[asked]
    try:
        policy = future.result()["cleanup.policy"].value
    except KafkaException as error:
        told = f"the settings of the topic {topic!r} cannot be read"
        raise explain_failed(
            error.args[0], settings, topic, "DESCRIBE_CONFIGS", told
        ) from None
    return str(policy)


def delete_group(settings: Settings, group: str, timeout: float = 5.0) -> None:
    """Delete a group that nobody needs any more; if that fails, Kafka does so later."""
    with suppress(AccessError, UnavailableError):
        delete_groups(settings, [group], timeout)


def _find_partitions(settings: Settings, topic: str) -> list[TopicPartition]:
    count = list_partitions(settings, [topic])[topic]
    if not count:
        raise missing_topics(settings, [topic])
    return [TopicPartition(topic, number) for number in range(count)]


def _list_all(
    settings: Settings,
    topic: str,
    spec: Any,
    *,
    committed: bool = False,
) -> dict[TopicPartition, int]:
    """Ask for one offset of each partition of a topic, until Kafka gives all.

    A partition that is left out would be missing in what is made of them, and nobody
    would notice. It has no leader for a moment if the topic is new, or a broker ends.
    """
    asked = _find_partitions(settings, topic)
    until = time.monotonic() + _PATIENCE
    while True:
        found = _list_offsets(settings, asked, spec, committed=committed)
        if len(found) == len(asked):
            return found
        if time.monotonic() > until:
            missing = sorted(one.partition for one in {*asked} - {*found})
            raise UnavailableError(
                f"Kafka gives no offset of {topic}/{missing[0]}, nor of "
                f"{len(missing) - 1} other partitions: are they without a leader? Try "
                "again"
            )
        time.sleep(_PAUSE)


def _list_offsets(
    settings: Settings,
    partitions: Iterable[TopicPartition],
    spec: Any,
    timeout: float = 5.0,
    *,
    committed: bool = False,
) -> dict[TopicPartition, int]:
    """Ask for one offset of each partition; those that do not exist are left out."""
    asked = dict.fromkeys(partitions, spec)
    more: dict[str, Any] = {"request_timeout": timeout}
    if committed:
        more["isolation_level"] = IsolationLevel.READ_COMMITTED
    # Keep the client until the answers are there: a deleted client gives none.
    admin = make_admin(settings)
    find_broker(admin, timeout)
    offsets = {}
    for one, future in admin.list_offsets(asked, **more).items():
        try:
            offsets[one] = future.result().offset
        except KafkaException as error:
            if error.args[0].code() not in SILENT:
                continue
            read_topics(settings, timeout)  # raises the reason if it is refused
            raise UnavailableError(
                f"no Kafka broker at {settings.kafka_bootstrap_servers} gives the "
                f"offsets of {one.topic!r}: {error.args[0].str()}"
            ) from None
    return offsets
