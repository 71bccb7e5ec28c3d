"""The gate: which records other groups have handled already. It only decides.

A consumer may depend on other groups: none of its records is handled before each of
them has handled that record: see :mod:`jobs_lib.kafka.dependencies`.

A record is compared by its place in the dependency's topic. If the consumer reads
another topic, which is derived from that one, a header of each record says the place.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs_lib.consuming.progress import get_offset
from jobs_lib.consuming.record import describe, read_header
from jobs_lib.errors import ConfigurationError, RecordError
from jobs_lib.kafka.dependencies import (
    Dependency,
    Place,
    choose_wait,
    find_end,
    find_wait,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from confluent_kafka import Message

    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.kafka.dependencies import Answers, Wait

DERIVED_FROM = "ce_derivedfrom"
"""The header with the record's place in the topic that its own is derived from."""
_PLACE = re.compile(r"([^/]+)/([0-9]{1,10})/([0-9]{1,19})")

Places = Mapping[str, Place]
"""Where one record is in each topic that its dependencies read."""


@dataclass(slots=True)
class Held:
    """A partition whose next record may not be handled yet."""

    places: Places
    """Those of this record."""
    wait: Wait
    """What it waits for: the group that is furthest behind."""
    since: float
    """By ``time.monotonic()``."""


class Gate:
    """The gate before the records of one topic, in one group."""

    def __init__(self, topic: str, after: Iterable[Dependency]) -> None:
        """Note what the topic's records wait for; at most one more topic is named."""
        self.after = tuple(after)
        self._topic = topic
        self._by_topic: dict[str, list[Dependency]] = defaultdict(list)
        for one in self.after:
            self._by_topic[one.topic].append(one)

    def locate(self, message: Message) -> Places:
        """Find a record's place in each topic of its dependencies.

        Raises:
            RecordError: the record does not say its place in another topic.
        """
        return {topic: self._locate(message, topic) for topic in self._by_topic}

    def find_wait(self, places: Places, answers: Answers) -> Wait | None:
        """Find what a record waits for; None if it may be handled.

        Of several groups it is the one that is furthest behind.
        """
        return choose_wait(
            find_wait(one, answers[one], places[one.topic]) for one in self.after
        )

    def count_open(self, block: Sequence[Message], answers: Answers) -> int:
        """Count the records from the first one on that may be handled.

        Raises:
            RecordError: the first one does not say its place in another topic.
        """
        count = len(block)
        for topic, after in self._by_topic.items():
            if topic == self._topic:
                # The offsets grow: there is no need to look at each.
                end = find_end(after, answers, block[0].partition() or 0)
                count = bisect_left(block, end, hi=count, key=get_offset)
            else:
                count = self._count_derived(block[:count], topic, answers)
        return count

    def _count_derived(
        self, block: Sequence[Message], topic: str, answers: Answers
    ) -> int:
        ends: dict[int, int] = {}
        for index, message in enumerate(block):
            try:
                place = self._locate(message, topic)
            except RecordError:
                # Those before it are handled first.
                if not index:
                    raise
                return index
            if place.partition not in ends:
                after = self._by_topic[topic]
                ends[place.partition] = find_end(after, answers, place.partition)
            if place.offset >= ends[place.partition]:
                return index
        return len(block)

    def _locate(self, message: Message, topic: str) -> Place:
        if topic == self._topic:
            return Place(message.partition() or 0, get_offset(message))
        return read_derived_from(message, topic)


def read_derived_from(message: Message, topic: str) -> Place:
    """Read a record's place in the topic that its own is derived from.

    Raises:
        RecordError: its header is missing, or says something else.
    """
    text = read_header(message, DERIVED_FROM)
    if (place := _PLACE.fullmatch(text or "")) and place[1] == topic:
        return Place(int(place[2]), int(place[3]))
    found = "missing" if text is None else "something else"
    raise RecordError(
        f"the record at {describe(message)} waits for groups that read {topic!r}, and "
        f"its place there is not known: its header {DERIVED_FROM} is {found}. Its "
        f"producer must set it to {topic}/<partition>/<offset> of the record that it "
        "was made of"
    )


def check_circles(waiting: Mapping[Dependency, Collection[Dependency]]) -> None:
    """Refuse consumers that would wait for themselves, alone or in a circle.

    Args:
        waiting: the topic and group of each consumer, and what it waits for.

    Raises:
        ConfigurationError: there are such consumers.
    """
    for one, after in waiting.items():
        if any(other.group == one.group for other in after):
            raise ConfigurationError(
                f"the consumer of {one.topic!r} in the group {one.group!r} waits for "
                "its own group, and would wait for ever: leave that one out of `after`"
            )
    for one in waiting:
        if circle := _find_circle(one, waiting):
            named = " for ".join(f"{group!r} on {topic!r}" for topic, group in circle)
            raise ConfigurationError(
                f"consumers wait for each other for ever: {named}. Leave one of these "
                "out of the `after` of another"
            )


def check_own_done(
    name: str, after: Iterable[Dependency], consumers: Collection[Subscription]
) -> None:
    """Refuse a job type whose jobs would wait for themselves.

    Jobs of a consumer wait for ever for its group ``<group>.done``, which waits for
    them. If several consumers read the topic, only the enqueue shows whose job it is.

    Args:
        name: of the job type.
        after: what it waits for.
        consumers: of the app.

    Raises:
        ConfigurationError: only one consumer could enqueue its jobs, and they would
            wait for that one's jobs.
    """
    for topic, group in after:
        groups = {one.done_group for one in consumers if one.topic == topic}
        if groups == {group}:
            raise ConfigurationError(
                f"jobs of {name!r} come from the consumer of {topic!r} and wait for "
                f"{group!r}, which waits until they are done: leave that one out of "
                "`after`"
            )


def _find_circle(
    start: Dependency, waiting: Mapping[Dependency, Collection[Dependency]]
) -> list[Dependency]:
    """Find the consumers by which one waits for itself; it is the first and last."""
    came_from = dict.fromkeys(waiting[start], start)
    left = list(came_from)
    while left:
        one = left.pop()
        if one == start:
            path = [one, came_from[one]]
            while path[-1] != start:
                path.append(came_from[path[-1]])
            return path[::-1]
        for other in waiting.get(one, ()):
            if other not in came_from:
                came_from[other] = one
                left.append(other)
    return []
