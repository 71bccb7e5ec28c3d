"""How far groups are behind the ends of a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import KafkaException

from jobs_lib.errors import UnavailableError
from jobs_lib.kafka.client import make_admin
from jobs_lib.kafka.places import find_places, read_committed
from jobs_lib.kafka.refusal import explain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs_lib.kafka.positions import Positions
    from jobs_lib.settings import Settings

_TIMEOUT = 10.0
_GROUPS = 200
_SILENT = 3
"""Groups that give no answer before no more are asked: each one costs seconds."""


class ReadingGroup(NamedTuple):
    """A group that has committed offsets of a topic.

    Attributes:
        group: its name in Kafka.
        lag: the records that it has not handled yet.
    """

    group: str
    lag: int


class Readers(NamedTuple):
    """The groups that read a topic.

    Attributes:
        groups: the one that is furthest behind comes first.
        left_out: how many groups of the cluster were not asked, since there are many,
            or gave no answer.
    """

    groups: list[ReadingGroup]
    left_out: int


def count_lag(
    starts: Mapping[int, int], ends: Mapping[int, int], committed: Mapping[int, int]
) -> int:
    """Count the offsets from a group's place up to the end, over all partitions.

    A compacted topic has fewer records than offsets.

    Args:
        starts: the offset of the oldest record of each partition.
        ends: the end of each of them.
        committed: the group's place; where it has none, it begins with the oldest.
    """
    return sum(
        max(0, end - max(starts.get(number, 0), committed.get(number, 0)))
        for number, end in ends.items()
    )


def ask_lag(positions: Positions, topic: str, group: str, within: float) -> int | None:
    """Ask how far a group is behind; None if Kafka has not said so lately.

    The call is the question for the next answer. An offset above the end is none: the
    topic was made anew, and the group has handled nothing of it.

    Args:
        positions: asks Kafka.
        topic: by its name in Kafka.
        group: by its name in Kafka.
        within: seconds, the age of the answer at most.
    """
    starts = positions.ask_starts(topic, within=within)
    ends = positions.ask_ends(topic, within=within)
    committed = positions.ask_committed(group, topic, within=within)
    handled = positions.ask_handled(group, topic, within=within)
    if starts is None or ends is None or committed is None or handled is None:
        return None
    if not (starts.is_complete and ends.is_complete):
        return None
    places = {
        number: offset
        for number, offset in committed.offsets.items()
        if number not in handled.above
    }
    return count_lag(starts.offsets, ends.offsets, places)


def find_readers(settings: Settings, topic: str, *, every: bool = False) -> Readers:
    """Find the groups that have committed offsets of a topic, and how far each is.

    Groups are left out that this client may not describe.

    Args:
        settings: where Kafka is.
        topic: by its name in Kafka.
        every: ask all groups of the cluster, however long that takes, and fail if one
            gives no answer.

    Raises:
        AccessError: Kafka does not let this client in.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers in time.
    """
    starts = find_places(settings, topic, "start")
    ends = find_places(settings, topic, "end")
    names = _list_groups(settings, topic)
    found, answered, silent = [], 0, 0
    for name in names if every else names[:_GROUPS]:
        try:
            committed = read_committed(settings, name, topic)
        except UnavailableError:
            # A group may have no coordinator for a while, and be nobody's concern.
            silent += 1
            if every:
                raise
            if silent == _SILENT:
                break
            continue
        answered += 1
        if any(offset > ends.get(number, 0) for number, offset in committed.items()):
            # They have grown, or the offset is that of a topic that was made anew.
            ends = find_places(settings, topic, "end")
        if committed:
            places = {
                number: offset
                for number, offset in committed.items()
                if offset <= ends.get(number, 0)
            }
            found.append(ReadingGroup(name, count_lag(starts, ends, places)))
    found.sort(key=lambda one: -one.lag)
    return Readers(found, len(names) - answered)


def _list_groups(settings: Settings, topic: str) -> list[str]:
    """List the names of all groups of the cluster, sorted."""
    admin = make_admin(settings)
    try:
        listed = admin.list_consumer_groups(request_timeout=_TIMEOUT).result()
    except KafkaException as failure:
        raise explain(failure.args[0], settings, topic, "DESCRIBE") from None
    # Without the right to describe the cluster, it lists what it may describe.
    return sorted(one.group_id for one in listed.valid)
