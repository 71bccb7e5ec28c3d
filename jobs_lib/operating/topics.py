"""Compare the topics in Kafka with those that an app declares, and apply changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from jobs_lib.errors import TopicError
from jobs_lib.kafka.checks import is_as_good
from jobs_lib.kafka.client import create_topic, list_partitions, make_admin
from jobs_lib.kafka.refusal import explain_failed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jobs_lib.app import App
    from jobs_lib.outbox.topic import Topic
    from jobs_lib.streams.stream import Stream

_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between a topic in Kafka and its declaration."""

    topic: str
    what: str
    """``exists``, ``partitions``, or a setting of the topic."""
    found: str
    wanted: str
    applies: bool
    """Whether :func:`apply_topics` changes it. It never changes the number of
    partitions: keys would move."""


def plan_topics(app: App) -> list[Change]:
    """List the differences between Kafka and the declarations; changes nothing.

    Raises:
        AccessError: Kafka does not let this client in, or denies it a right.
        UnavailableError: no broker answers.
        TopicError: a broker does not show a topic's settings.
    """
    topics = app.written
    partitions = list_partitions(app.settings, [topic.name for topic in topics])
    found = _read_configs(app, [topic for topic in topics if partitions[topic.name]])
    changes = []
    for topic in topics:
        name = topic.name
        count = partitions[name]
        if not count:
            wanted = f"{topic.partitions} partitions"
            changes.append(Change(name, "exists", "no", wanted, applies=True))
            continue
        if count != topic.partitions:
            wanted = str(topic.partitions)
            changes.append(
                Change(name, "partitions", str(count), wanted, applies=False)
            )
        changes += _compare(topic, found[name])
    return changes


def _compare(
    topic: Topic[Any] | Stream[Any], found: Mapping[str, str]
) -> Iterator[Change]:
    """Compare the settings: of those that nobody declared, only what will not do."""
    for key, value in topic.config.items():
        now = found.get(key, "")
        if now != value and (key in topic.given or not is_as_good(key, now, value)):
            yield Change(topic.name, key, now, value, applies=True)


def apply_topics(app: App) -> list[Change]:
    """Create missing topics and set what differs; returns the differences.

    The number of partitions stays as it was: see :func:`explain_left`.

    Raises:
        AccessError: Kafka does not let this client in, or denies it a right.
        UnavailableError: no broker answers.
        TopicError: a broker refuses; the message says what. Call again to go on.
    """
    changes = plan_topics(app)
    admin = make_admin(app.settings)
    topics = {topic.name: topic for topic in app.written}
    settings: dict[str, list[Any]] = {}
    for change in changes:
        if change.what == "exists":
            topic = topics[change.topic]
            try:
                if not create_topic(admin, topic.name, topic.partitions, topic.config):
                    raise TopicError(
                        f"the topic {topic.name!r} was created by another client "
                        "meanwhile, so it is not set as declared: run this again"
                    )
            except KafkaException as error:
                told = f"the topic {topic.name!r} cannot be created"
                raise explain_failed(
                    error.args[0], app.settings, topic.name, "CREATE", told
                ) from None
        elif change.applies:
            entry = ConfigEntry(
                change.what,
                change.wanted,
                incremental_operation=AlterConfigOpType.SET,
            )
            settings.setdefault(change.topic, []).append(entry)
    for name, entries in settings.items():
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
        future = admin.incremental_alter_configs([resource], request_timeout=_SECONDS)
        try:
            future[resource].result()
        except KafkaException as error:
            told = f"the topic {name!r} cannot be set"
            raise explain_failed(
                error.args[0], app.settings, name, "ALTER_CONFIGS", told
            ) from None
    return changes


def explain_left(changes: list[Change]) -> list[str]:
    """Explain what :func:`apply_topics` left as it was: a line each, with a way out."""
    return [
        f"the topic {change.topic!r} has {change.found} partitions and is declared "
        f"with {change.wanted}. Another number would move keys, so you must change it "
        f"yourself: declare partitions={change.found}, or add partitions in Kafka and "
        "see `jobs-lib topics repartition`"
        for change in changes
        if not change.applies
    ]


def _read_configs(
    app: App, topics: list[Topic[Any] | Stream[Any]]
) -> dict[str, dict[str, str]]:
    if not topics:
        return {}
    admin = make_admin(app.settings)
    asked = [ConfigResource(ResourceType.TOPIC, topic.name) for topic in topics]
    found = {}
    for resource, future in admin.describe_configs(
        asked, request_timeout=_SECONDS
    ).items():
        try:
            entries = future.result()
        except KafkaException as error:
            told = f"the settings of the topic {resource.name!r} cannot be read"
            raise explain_failed(
                error.args[0], app.settings, resource.name, "DESCRIBE_CONFIGS", told
            ) from None
        found[resource.name] = {key: str(one.value) for key, one in entries.items()}
    return found
