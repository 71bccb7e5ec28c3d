"""Read and change the settings that a topic has of its own, and cut its log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    ResourceType,
)

from jobs_lib.errors import UnavailableError
from jobs_lib.kafka.client import make_admin
from jobs_lib.kafka.places import find_places
from jobs_lib.kafka.refusal import explain_failed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jobs_lib.settings import Settings

_SECONDS = 10.0
_CUT_SECONDS = 60.0
"""How long a log may take until it begins where it was cut."""
_PAUSE = 0.1


def read_own(
    settings: Settings, topic: str, names: Iterable[str]
) -> dict[str, str | None]:
    """Read some settings of a topic; None for those that it has not of its own.

    Raises:
        AccessError: Kafka denies the right.
        TopicError: they cannot be read.
        UnavailableError: no broker answers.
    """
    found = _describe(settings, topic)
    own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    return {
        name: str(entry.value)
        if (entry := found.get(name)) is not None and entry.source == own
        else None
        for name in names
    }


def read_effective(
    settings: Settings, topic: str, names: Iterable[str]
) -> dict[str, str]:
    """Read some settings of a topic as they hold, whoever has set them.

    Those that the broker does not know are empty.

    Raises:
        AccessError: Kafka denies the right.
        TopicError: they cannot be read.
        UnavailableError: no broker answers.
    """
    found = _describe(settings, topic)
    return {
        name: str(entry.value) if (entry := found.get(name)) is not None else ""
        for name in names
    }


def _describe(settings: Settings, topic: str) -> dict[str, Any]:
    admin = make_admin(settings)
    asked = ConfigResource(ResourceType.TOPIC, topic)
    future = admin.describe_configs([asked], request_timeout=_SECONDS)[asked]
    try:
        found: dict[str, Any] = future.result()
    except KafkaException as failure:
        raise _explain(failure, settings, topic, "DESCRIBE_CONFIGS") from None
    return found


def change(settings: Settings, topic: str, wanted: Mapping[str, str | None]) -> None:
    """Change settings of a topic in one step; None removes one of its own.

    Raises:
        AccessError: Kafka denies the right.
        TopicError: it refuses.
    """
    entries = [
        ConfigEntry(
            name,
            value,
            incremental_operation=AlterConfigOpType.DELETE
            if value is None
            else AlterConfigOpType.SET,
        )
        for name, value in wanted.items()
    ]
    admin = make_admin(settings)
    asked = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    future = admin.incremental_alter_configs([asked], request_timeout=_SECONDS)[asked]
    try:
        future.result()
    except KafkaException as failure:
        raise _explain(failure, settings, topic, "ALTER_CONFIGS") from None


def delete_before(settings: Settings, topic: str, ends: Mapping[int, int]) -> None:
    """Delete the records before some offsets, and wait until the log begins there.

    Kafka does so only for a topic whose ``cleanup.policy`` has ``delete``, and a broker
    may not have heard of a new policy yet.

    Raises:
        AccessError: Kafka denies the right.
        TopicError: it refuses, or the log does not begin there in time.
    """
    admin = make_admin(settings)
    places = [TopicPartition(topic, number, end) for number, end in ends.items() if end]
    until = time.monotonic() + _CUT_SECONDS
    while True:
        failure: KafkaException | None = None
        asked = admin.delete_records(places, request_timeout=_SECONDS) if places else {}
        for future in asked.values():
            try:
                future.result()
            except KafkaException as error:
                failure = error
        if failure is None:
            starts = find_places(settings, topic, "start")
            if all(starts.get(one, 0) >= end for one, end in ends.items()):
                return
        if time.monotonic() > until:
            if failure is not None:
                raise _explain(failure, settings, topic, "DELETE") from None
            raise UnavailableError(
                f"the log of {topic!r} does not begin where it was cut after "
                f"{_CUT_SECONDS:g} s: are all its partitions' leaders there? Try again"
            )
        time.sleep(_PAUSE)


def _explain(
    failure: KafkaException, settings: Settings, topic: str, right: str
) -> Exception:
    told = f"Kafka refuses what is asked of the topic {topic!r}"
    return explain_failed(failure.args[0], settings, topic, right, told)
