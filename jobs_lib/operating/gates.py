"""Show for which groups the consumers of an app wait, and how far those are."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jobs_lib.consuming.gate import read_derived_from
from jobs_lib.consuming.progress import get_offset
from jobs_lib.errors import JobsError, RecordError
from jobs_lib.kafka.dependencies import Dependency, Place, check_ends, find_wait
from jobs_lib.kafka.places import find_committed_ends, find_places, read_committed
from jobs_lib.kafka.positions import KnownOffsets
from jobs_lib.kafka.reader import PartsReader, Span
from jobs_lib.operating.session import bounded
from jobs_lib.postgres.database import Database

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from confluent_kafka import Message

    from jobs_lib.app import App
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.settings import Settings

State = Literal["open", "waits", "missing", "empty", "unknown", "above"]


@dataclass(frozen=True, slots=True)
class GatePart:
    """How far one group is that a partition of a consumer waits for."""

    group: str
    """The consumer's."""
    topic: str
    partition: int
    offset: int
    """The offset to go on from."""
    after_topic: str
    after: str
    """The group to wait for."""
    committed: int | None
    """The next offset that this group reads there; None if it has committed none."""
    needs: int | None
    """The lowest offset that lets the next record be handled; None if that is not
    known."""
    state: State
    """``open``: the next record may be handled. ``waits``: the group is behind it.
    ``missing``: the group has committed nothing of its topic. ``empty``: there is no
    next record. ``unknown``: the next record does not say of which one it was made.
    ``above``: the committed offset is above the end of its partition."""


def list_gates(app: App) -> list[GatePart]:
    """List what the consumers of an app wait for, by consumer, partition and group.

    Raises:
        TopicError: a topic does not exist, or is not visible.
        UnavailableError: the database or Kafka does not answer.
    """
    database = Database.of(app.settings)
    found: list[GatePart] = []
    for declared in sorted(app.consumers, key=lambda one: (one.topic, one.group)):
        if declared.after:
            parts = _list_parts(app.settings, database, declared)
            found += sorted(parts, key=lambda part: part.partition)
    return found


def explain_wait(
    settings: Settings, dependency: tuple[str, str], place: tuple[int, int]
) -> str | None:
    """Say what a record still lacks of one group; None if the group has handled it.

    Args:
        settings: where Kafka is.
        dependency: the topic and the group, by their names in Kafka.
        place: the partition and the offset of the record.
    """
    one = Dependency(*dependency)
    try:
        answer: KnownOffsets | None = _ask(settings, one)
    except JobsError:
        answer = None
    wait = find_wait(one, answer, Place(*place))
    return None if wait is None else wait.explain()


def _list_parts(
    settings: Settings, database: Database, declared: Subscription
) -> Iterator[GatePart]:
    topic = declared.topic
    starts = find_places(settings, topic, "start")
    stored = _read_stored(database, declared, starts)
    # The consumer cannot read what an open transaction hides.
    ends = find_committed_ends(settings, topic)
    left = {
        (topic, number): Span(max(start, stored.get(number, start)), ends[number])
        for number, start in starts.items()
    }
    firsts = _read_firsts(settings, declared.group, left)
    for one in declared.after:
        answer = _ask(settings, one)
        for (_, number), span in left.items():
            first = firsts.get(number)
            is_last = first is None
            place: Place | None = Place(number, span.end)
            if one.topic != topic:
                place = _find_derived(first, one.topic)
            elif first is not None:
                place = Place(number, get_offset(first))
            yield GatePart(
                group=declared.group,
                topic=topic,
                partition=number,
                offset=stored.get(number, span.start or 0),
                after_topic=one.topic,
                after=one.group,
                committed=_find_committed(answer, place.partition if place else number),
                needs=None if is_last or place is None else place.offset + 1,
                state=_find_state(one, answer, place, is_last=is_last),
            )


def _find_state(
    one: Dependency, answer: KnownOffsets, place: Place | None, *, is_last: bool
) -> State:
    if not answer.offsets and not answer.above:
        return "missing"
    if place is not None and place.partition in answer.above:
        return "above"
    if is_last:
        return "empty"
    if place is None:
        return "unknown"
    wait = find_wait(one, answer, place)
    return "open" if wait is None else wait.state


def _find_committed(answer: KnownOffsets, partition: int) -> int | None:
    return answer.offsets.get(partition, answer.above.get(partition))


def _ask(settings: Settings, one: Dependency) -> KnownOffsets:
    offsets = read_committed(settings, one.group, one.topic)
    committed = KnownOffsets(len(offsets), offsets, time.monotonic())
    ends = find_places(settings, one.topic, "end")
    high = KnownOffsets(len(ends), ends, time.monotonic())
    return check_ends(committed, high)


def _read_stored(
    database: Database, declared: Subscription, numbers: Iterable[int]
) -> dict[int, int]:
    """Read the offsets in the database, which count for the consumer."""
    partitions = [*numbers]
    names = {
        "group": declared.group,
        "topics": [declared.topic] * len(partitions),
        "partitions": partitions,
    }
    with database.connect("gates") as connection, bounded(connection, database):
        rows = connection.execute(database.queries["read_offsets"], names).fetchall()
    return {number: at for _, number, at in rows if at is not None}


def _read_firsts(
    settings: Settings, group: str, spans: Mapping[tuple[str, int], Span]
) -> dict[int, Message]:
    """Read the first record of each part that has one.

    Not each offset has a record: some are markers of transactions, or were aborted, or
    compacted.
    """
    open_ = {one: span for one, span in spans.items() if (span.start or 0) < span.end}
    firsts: dict[int, Message] = {}
    if not open_:
        return firsts
    with PartsReader(settings, open_, group, most=1) as reader:
        for partition, messages in reader:
            firsts[partition[1]] = messages[0]
            reader.leave(partition)
    return firsts


def _find_derived(message: Message | None, topic: str) -> Place | None:
    if message is None:
        return None
    try:
        return read_derived_from(message, topic)
    except RecordError:
        return None
