"""Create and delete topics of the tests' broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    NewPartitions,
    OffsetSpec,
)
from confluent_kafka.cimpl import NewTopic

from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from confluent_kafka.admin import AdminClient

_REQUEST_SECONDS = 30.0


def create_topic(
    admin: AdminClient,
    name: str,
    partitions: int = 1,
    config: Mapping[str, str] | None = None,
) -> None:
    """Create a topic and wait until each of its partitions can be written to."""
    new = NewTopic(
        name,
        num_partitions=partitions,
        replication_factor=1,
        config=dict(config or {}),
    )
    admin.create_topics([new], request_timeout=_REQUEST_SECONDS)[name].result()
    _await_partitions(admin, name, partitions)


def grow_topic(admin: AdminClient, name: str, partitions: int) -> None:
    """Add partitions to a topic until it has so many, and wait for their leaders."""
    growing = admin.create_partitions(
        [NewPartitions(name, partitions)], request_timeout=_REQUEST_SECONDS
    )
    growing[name].result()
    _await_partitions(admin, name, partitions)


def make_anew(admin: AdminClient, name: str, partitions: int) -> None:
    """Delete a topic, and create another one of its name.

    The broker shows the old one for a moment longer. It would seem to be the new one.
    """
    delete_topics(admin, [name])

    def is_gone() -> bool:
        found = admin.list_topics(name, timeout=_REQUEST_SECONDS).topics[name]
        return found.error is not None

    wait_for(is_gone, timeout=30, what=f"the topic {name} is gone")
    create_topic(admin, name, partitions)


def _await_partitions(admin: AdminClient, name: str, partitions: int) -> None:
    places = [TopicPartition(name, number) for number in range(partitions)]

    def ready() -> bool:
        topic = admin.list_topics(name, timeout=_REQUEST_SECONDS).topics[name]
        leaders = [part.leader for part in topic.partitions.values()]
        return len(leaders) == partitions and min(leaders) >= 0 and answers()

    def answers() -> bool:
        # A broker names itself leader of a new partition before it acts as one.
        asked = dict.fromkeys(places, OffsetSpec.latest())
        ends = admin.list_offsets(asked, request_timeout=_REQUEST_SECONDS)
        return all(end.exception() is None for end in ends.values())

    wait_for(
        ready,
        timeout=120,
        what=f"topic {name} has {partitions} partitions with leaders",
    )


def delete_topics(admin: AdminClient, names: Iterable[str]) -> None:
    """Delete those of the topics that still exist, and wait until the broker says so.

    The controller answers before the broker forgets a topic.
    """
    if not (wanted := list(names)):
        return
    deleting = admin.delete_topics(wanted, request_timeout=_REQUEST_SECONDS)
    for future in deleting.values():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
    wait_for(
        lambda: (
            admin.list_topics(timeout=_REQUEST_SECONDS).topics.keys().isdisjoint(wanted)
        ),
        timeout=60,
        what=lambda: f"the topics {wanted} are gone",
    )
