"""Groups that must have handled a record first, and how far they are. It only decides.

The offset that a group has committed is the next one that it reads, so it has handled
what lies below. What is not known is not handled: Kafka has not answered, its answer is
too old, or a group has committed nothing of the partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs_lib.kafka.positions import KnownOffsets

REFRESHES = 3
"""An answer that is older than so many refreshes counts no more."""


class Dependency(NamedTuple):
    """A group that must have handled a record first, by its names in Kafka."""

    topic: str
    """The topic that it reads."""
    group: str


class Place(NamedTuple):
    """Where a record is in a topic."""

    partition: int
    offset: int


Answers = Mapping[Dependency, "KnownOffsets | None"]
"""What Kafka has answered of each dependency; None without an answer, or if the last
one is too old."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a record may not be handled yet: what one group lacks."""

    dependency: Dependency
    place: Place
    """The record's place in the topic of the dependency."""
    committed: int | None
    """The next offset that the group reads there; None if that is not known."""
    state: Literal["waits", "missing", "unknown", "above"]
    """The group is behind; or it has committed nothing of the whole topic; or Kafka
    does not say; or its offset lies above the end of the partition."""

    @property
    def behind(self) -> int:
        """How many offsets the group has to pass; from the start if it is not known."""
        known = 0 if self.state == "above" else self.committed or 0
        return self.place.offset + 1 - known

    def explain(self) -> str:
        """Say what the record waits for."""
        topic, group = self.dependency
        if self.state == "unknown":
            return f"Kafka does not say how far the group {group!r} is in {topic!r}"
        if self.state == "missing":
            return (
                f"the group {group!r} has committed nothing of {topic!r}: does it run, "
                "and is this its name?"
            )
        if self.state == "above":
            return (
                f"the group {group!r} has committed the offset {self.committed} of "
                f"{topic}/{self.place.partition}, which is above its end: was the "
                "topic made anew? It has to commit an offset that there is"
            )
        return (
            f"the group {group!r} is at offset {self.committed or 0} of "
            f"{topic}/{self.place.partition}, and has to pass {self.place.offset}"
        )


def check_ends(
    committed: KnownOffsets, high: KnownOffsets, before: KnownOffsets | None = None
) -> KnownOffsets:
    """Compare the offsets of a group with the ends of its topic, which only grow.

    An offset above an end that was read later says nothing: the topic was made anew. If
    the end was read sooner, what was found before counts until the end is read again.

    Args:
        committed: the offsets of the group.
        high: the high watermarks.
        before: what was found of earlier offsets of the same topic.
    """
    offsets_before = before.offsets if before is not None else {}
    above_before = before.above if before is not None else {}
    found: dict[int, int] = {}
    above: dict[int, int] = {}
    for partition, offset in committed.offsets.items():
        end = high.offsets.get(partition)
        if end is not None and offset <= end:
            found[partition] = offset
        elif (end is not None and committed.read_at < high.read_at) or (
            above_before.get(partition) == offset
        ):
            above[partition] = offset
        elif (known := offsets_before.get(partition)) is not None:
            found[partition] = min(known, offset)
    return replace(committed, offsets=found, above=above)


def find_end(after: Iterable[Dependency], answers: Answers, partition: int) -> int:
    """Find up to which offset all groups have handled a partition; 0 if one is unknown.

    Args:
        after: the groups, which read the same topic.
        answers: how far they are.
        partition: of that topic.
    """
    ends = []
    for one in after:
        answer = answers[one]
        ends.append(0 if answer is None else answer.offsets.get(partition, 0))
    return min(ends)


def find_wait(
    dependency: Dependency, answer: KnownOffsets | None, place: Place
) -> Wait | None:
    """Find what a record lacks of one group; None if the group has handled it."""
    if answer is None:
        return Wait(dependency, place, None, "unknown")
    if (above := answer.above.get(place.partition)) is not None:
        return Wait(dependency, place, above, "above")
    if not answer.offsets and not answer.above:
        return Wait(dependency, place, None, "missing")
    committed = answer.offsets.get(place.partition)
    if committed is not None and place.offset < committed:
        return None
    return Wait(dependency, place, committed, "waits")


def choose_wait(waits: Iterable[Wait | None]) -> Wait | None:
    """Choose the wait for the group that is furthest behind; None if there is none."""
    found = (one for one in waits if one is not None)
    return max(found, key=_order, default=None)


def _order(wait: Wait) -> tuple[bool, int]:
    return wait.state != "waits", wait.behind
