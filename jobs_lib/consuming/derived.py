"""How far a group is in the topic that its own topic is made of.

A service that reads ``payments`` writes ``transfers``, and another one reads these. How
far is that one in ``payments``? It is done up to where the maker is done, once it is
done with all the transfers that there were when the maker said so. The maker says it by
the offsets of a group, and must not before its transfers are in Kafka.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.kafka.dependencies import Dependency
    from jobs_lib.kafka.member import Partition
    from jobs_lib.kafka.positions import KnownOffsets, Positions


@dataclass(slots=True)
class _Awaited:
    """An offset of the maker, reached once the derived partition's end is."""

    made: int
    read_at: float
    """Before the maker's offset was asked for."""
    end: int | None = None
    """Where the derived partition ended afterwards; None as long as nobody knows."""


class Derived:
    """Finds how far topics are done, in the offsets of what they are made of."""

    def __init__(self, makers: Mapping[str, Dependency], positions: Positions) -> None:
        """Begin with nothing.

        Args:
            makers: by derived topic: the topic that it is made of, and the group that
                tells how far it was made.
            positions: says how far groups are, and where topics begin and end.
        """
        self._makers = makers
        self._positions = positions
        self._awaited: dict[Partition, _Awaited] = {}
        self._reached: dict[Partition, int] = {}

    def find(
        self, offsets: Mapping[Partition, int], new: Collection[Partition] = ()
    ) -> dict[Partition, int]:
        """Find how far partitions of the common topics are done.

        Args:
            offsets: up to where the owned partitions of derived topics are done.
            new: those of which the group has had no record yet. It begins with the
                oldest one that is left, and may find none: they may all have expired.

        Returns those offsets that are known; the partitions have the same numbers.
        """
        for known in (self._awaited, self._reached):
            for one in [*known]:
                if one not in offsets:
                    del known[one]
        for topic, maker in self._makers.items():
            # Old answers are no harm: they were true, and this is asked once a second.
            made = self._positions.ask_committed(maker.group, maker.topic)
            # Committed or not: what the maker has sent may be about to be committed.
            ends = self._positions.ask_high(topic)
            if made is None or ends is None:
                continue
            starts = self._find_starts(topic, new)
            for one, done in offsets.items():
                if one[0] == topic:
                    self._look(one, max(done, starts.get(one, 0)), made, ends)
        return {
            (self._makers[topic].topic, number): at
            for (topic, number), at in self._reached.items()
        }

    def _find_starts(
        self, topic: str, new: Collection[Partition]
    ) -> dict[Partition, int]:
        """Find where these partitions begin, as far as they are of the topic."""
        if not (of_topic := [one for one in new if one[0] == topic]):
            return {}
        starts = self._positions.ask_starts(topic)
        known = {} if starts is None else starts.offsets
        return {one: known[one[1]] for one in of_topic if one[1] in known}

    def _look(
        self, one: Partition, done: int, made: KnownOffsets, ends: KnownOffsets
    ) -> None:
        offset, end = made.offsets.get(one[1]), ends.offsets.get(one[1])
        if offset is None:
            self._awaited.pop(one, None)
            return
        # If it was set back, what it makes again is to be done again.
        if offset < self._reached.get(one, 0):
            self._reached[one] = offset
        awaited = self._awaited.setdefault(one, _Awaited(offset, made.read_at))
        if end is None:
            return
        # Answers of one round may have been read in either order.
        if awaited.end is None and ends.read_at > awaited.read_at:
            awaited.end = end
        if awaited.end is None:
            return
        if done >= awaited.end:
            self._reached[one] = min(awaited.made, offset)
            self._awaited[one] = _Awaited(offset, made.read_at)
        elif end < awaited.end:
            del self._awaited[one]  # the topic was made anew


def make_derived(
    declared: Iterable[Subscription], positions: Positions | None
) -> Derived | None:
    """Make what finds how far a group is in the topics that its own are made of.

    Args:
        declared: what the group reads.
        positions: says how far other groups are.

    Returns None if none of its topics is derived.
    """
    makers = {one.topic: one.derived_from for one in declared if one.derived_from}
    if positions is None or not makers:
        return None
    return Derived(makers, positions)
