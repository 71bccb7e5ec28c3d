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
from jobs_lib.errors import RecordError
from jobs_lib.kafka.dependencies import (
    Dependency,
    Place,
    choose_wait,
    find_end,
    find_wait,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from confluent_kafka import Message

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
