"""Find consumer groups that the services of two databases share by mistake.

Each database has offsets of its own, and Kafka shares the partitions among all members
of a group. So the members of one database would leave out what those of the other have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError

from jobs_lib.kafka.client import read_topics
from jobs_lib.kafka.members import describe_groups
from jobs_lib.kafka.places import read_commits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from uuid import UUID

    from jobs_lib.kafka.members import GroupMember
    from jobs_lib.settings import Settings

_SECONDS = 5.0
_NAMED = 5
_MARK = "jobs_lib-"
APART = (
    "each would read only a share of the partitions. Give one of the two an "
    "environment of its own (JOBS_LIB_ENVIRONMENT) or another group, or stop it. If "
    "the database was made anew, wait until the processes of the one before have left"
)
"""The way out for the services of two databases in one group."""


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """A group with members of another database.

    Attributes:
        group: by its name in Kafka.
        topic: one that the group has read for the other database.
        members: the client ids and hosts of the members that are not ours.
    """

    group: str
    topic: str
    members: tuple[str, ...]

    def __str__(self) -> str:
        more = len(self.members) - _NAMED
        return (
            f"the service of another database reads the topic {self.topic!r} in the "
            f"group {self.group!r}, as {', '.join(self.members[:_NAMED])}"
            + (f" and {more} more" if more > 0 else "")
        )


def mark_commits(installation: UUID, topic_id: UUID | None = None) -> str:
    """The metadata of the offsets that the services of a database commit.

    Args:
        installation: the database's identity.
        topic_id: of the topic that the offsets belong to, where nothing else keeps it.
    """
    mark = f"{_MARK}{installation}"
    return mark if topic_id is None else f"{mark} {topic_id}"


def read_topic_id(mark: str | None) -> str | None:
    """The id of the topic that an offset belongs to; None if its mark has none."""
    if mark is None or not mark.startswith(_MARK):
        return None
    return mark.partition(" ")[2] or None


def find_shared(
    settings: Settings,
    installation: UUID,
    read: Mapping[str, Collection[str]],
    find_pods: Callable[[], Collection[str]],
) -> Iterator[SharedGroup]:
    """Find the groups that services of another database are members of.

    Offsets without a mark say nothing: an earlier release has committed them, or
    somebody else. Nor do marks in a group without members: a service may get a new
    database.

    Args:
        settings: where Kafka is.
        installation: the database's identity.
        read: the topics by group.
        find_pods: reads the names of all pods of the database's own services. A process
            has its name there before it joins a group.

    Raises:
        AccessError: the brokers do not let this client in.
        UnavailableError: no broker answers.
    """
    members = _find_members(settings, read)
    # After the members: else a process of ours that joins now would pass for another's.
    ours = find_pods() if any(members.values()) else ()
    for group, found in members.items():
        others = sorted(
            f"{one.client_id} at {one.host.lstrip('/')}"
            for one in found
            if one.client_id not in ours
        )
        topic = _find_marked(settings, installation, group, read) if others else None
        if topic is not None:
            yield SharedGroup(group, topic, tuple(others))


def _find_members(
    settings: Settings, groups: Collection[str]
) -> dict[str, tuple[GroupMember, ...]]:
    """The members of groups; none of a group that cannot be described."""
    if not groups:
        return {}
    # It says the most about brokers that do not answer or do not let it in.
    read_topics(settings, _SECONDS)
    # One with an error has no coordinator yet, or the right to describe it is missing.
    return {
        group: found.members
        for group, found in describe_groups(settings, groups, _SECONDS).items()
        if not isinstance(found, KafkaError)
    }


def _find_marked(
    settings: Settings,
    installation: UUID,
    group: str,
    read: Mapping[str, Collection[str]],
) -> str | None:
    """A topic with an offset that the services of another database have committed."""
    ours = mark_commits(installation)
    for topic in sorted(read[group]):
        for at in read_commits(settings, group, topic):
            mark, _, _ = (at.metadata or "").partition(" ")
            if mark.startswith(_MARK) and mark != ours:
                return topic
    return None
