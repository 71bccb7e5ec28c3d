"""Let a consumer group read records again, beside the running service."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from jobs_lib.errors import OperatingError
from jobs_lib.kafka.places import find_places, find_starts
from jobs_lib.operating.session import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    import psycopg

    from jobs_lib.app import App
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings


@dataclass(frozen=True, slots=True)
class Rewound:
    """A partition that was set back."""

    topic: str
    partition: int
    before: int
    """The offset to go on from that it had."""
    after: int
    """The offset that it goes on from now."""
    skipped: int
    """The rows of the table `skipped` from there on; each goes with its record."""
    gone: int = 0
    """The rows before that whose records the topic has no more, which stay."""


def find_repeatable(app: App, topic: str, group: str | None = None) -> Subscription:
    """Find what an app does with a topic's records, if they may be applied again.

    Args:
        app: with the declaration.
        topic: the topic, as it is declared or as Kafka has it.
        group: likewise; None if only one group reads the topic.

    Raises:
        OperatingError: there is no such declaration, or there are several; or a
            handler does not say that it may be called again.
    """
    found = [
        one
        for one in app.consumers
        if one.is_called(topic) and (group is None or one.is_group(group))
    ]
    if len(found) > 1:
        groups = ", ".join(sorted(one.group for one in found))
        raise OperatingError(
            f"several groups of this app read {topic!r}: give one with --group "
            f"({groups})"
        )
    if not found:
        known = sorted(f"{one.topic} (group {one.group})" for one in app.consumers)
        raise OperatingError(
            f"no consumer of this app reads {topic!r}"
            + (f" in the group {group!r}" if group else "")
            + f"; it reads: {', '.join(known) or 'nothing'}"
        )
    (declared,) = found
    if not declared.is_repeatable:
        raise OperatingError(
            f"the handlers of {declared.topic!r} in the group {declared.group!r} do "
            "not say that records may be handled again: declare repeatable=True where "
            "the result is the same then"
        )
    return declared


def find_start(
    settings: Settings,
    database: Database,
    group: str,
    topic: str,
    at: Literal["start"] | int | datetime,
    partition: int | None = None,
) -> dict[int, int]:
    """Find where a group has to go on to read again from some place.

    Args:
        settings: where Kafka is.
        database: with the offsets.
        group: the group's name in Kafka.
        topic: the topic's name in Kafka.
        at: the oldest record, an offset, or a time in Kafka.
        partition: only this one; None for all that the group has read.

    Returns the offsets by partition, without those that lie before them already.

    Raises:
        OperatingError: the partition is not there, or has no such record.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers, or the database does not.
    """
    found = find_starts(settings, topic, at, partition)
    if isinstance(at, int):
        return found
    known = read_places(database, group, topic)
    return {
        number: place
        for number, place in found.items()
        if place < (known.get(number) or 0)
    }


def read_places(database: Database, group: str, topic: str) -> dict[int, int | None]:
    """Read the offsets from which a group goes on, by partition.

    Those of which it has applied nothing have None.

    Raises:
        UnavailableError: the database does not answer.
    """
    with database.connect("places") as connection, bounded(connection, database):
        rows = connection.execute(
            database.queries["read_places"], {"group": group, "topic": topic}
        ).fetchall()
    return dict(rows)


def rewind(
    database: Database, group: str, topic: str, places: Mapping[int, int]
) -> list[Rewound]:
    """Let a group go on from earlier places of a topic's partitions.

    A service that runs goes on there within two heartbeats. No block that it has begun
    can be committed any more.

    Args:
        database: with the offsets.
        group: the group's name in Kafka.
        topic: the topic's name in Kafka.
        places: the offset to go on from, by partition.

    Raises:
        OperatingError: the group has not read a partition, or not as far as that;
            nothing was changed.
    """
    with database.connect("rewind") as connection, bounded(connection, database):
        known = lock(connection, database, group, topic)
        for partition, place in sorted(places.items()):
            if partition not in known:
                raise OperatingError(
                    f"the group {group!r} has read nothing of {topic}/{partition}: "
                    + _list_known(known)
                )
            if not 0 <= place <= known[partition]:
                raise OperatingError(
                    f"the group {group!r} goes on from offset {known[partition]} of "
                    f"{topic}/{partition}: give an offset from 0 to that, not {place}"
                )
        return set_back(connection, database, group, topic, known, places)


def replay(
    settings: Settings,
    database: Database,
    group: str,
    topic: str,
    partition: int | None = None,
) -> list[Rewound]:
    """Let a group go on from the first record of each partition that it has skipped.

    All that follows is applied again, in order: the result is as if nothing had been
    skipped. What fails again is skipped again. If the topic has the record no more, the
    group goes on from the oldest one, and the row of the table `skipped` stays.

    Args:
        settings: where Kafka is.
        database: with the offsets.
        group: the group's name in Kafka.
        topic: the topic's name in Kafka.
        partition: only this one; None for all.

    Returns what was set back, and where records are gone; nothing, if nothing was
    skipped.

    Raises:
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers, or the database does not.
    """
    named = {"group": group, "topic": topic}
    with database.connect("replay") as connection, bounded(connection, database):
        (has_skipped,) = connection.execute(
            database.queries["has_skipped"], named
        ).fetchall()[0]
    if not has_skipped:
        return []
    # Not while the offsets are locked: Kafka may be slow.
    starts = find_places(settings, topic, "start")
    with database.connect("replay") as connection, bounded(connection, database):
        known = lock(connection, database, group, topic)
        asked = {
            **named,
            "partitions": [*starts],
            "starts": [*starts.values()],
        }
        skipped = connection.execute(database.queries["find_skipped"], asked).fetchall()
        found = {
            number: (max(offset, starts.get(number, 0)), gone)
            for number, offset, gone in skipped
            if offset < known.get(number, 0) and partition in (None, number)
        }
        # Of some nothing is left that could be applied again.
        places = {n: place for n, (place, _) in found.items() if place < known[n]}
        back = {
            one.partition: one
            for one in set_back(connection, database, group, topic, known, places)
        }
        stays = {n: Rewound(topic, n, known[n], known[n], 0) for n in found}
        return [
            replace(one, gone=found[number][1])
            for number, one in sorted((stays | back).items())
        ]


def lock(
    connection: psycopg.Connection[Any], database: Database, group: str, topic: str
) -> dict[int, int]:
    """Lock the group's offsets of a topic; returns them by partition."""
    of_group = {"group": group, "topic": topic}
    # The owner locks in this order, too: first its origin, and then the offset.
    connection.execute(database.queries["lock_consumed"], of_group)
    rows = connection.execute(database.queries["read_consumed"], of_group).fetchall()
    return {number: offset for number, offset in rows if offset is not None}


def set_back(
    connection: psycopg.Connection[Any],
    database: Database,
    group: str,
    topic: str,
    known: Mapping[int, int],
    places: Mapping[int, int],
) -> list[Rewound]:
    """Set partitions back in the open transaction that has locked them."""
    of_group = {"group": group, "topic": topic}
    moved = {
        **of_group,
        "partitions": [*places],
        "offsets": [*places.values()],
        "origins": [f"{topic}/{number}" for number in places],
    }
    skipped = dict(
        connection.execute(database.queries["count_skipped"], moved).fetchall()
    )
    connection.execute(database.queries["rewind_offsets"], moved)
    connection.execute(database.queries["release_consumed"], moved)
    return [
        Rewound(topic, number, known[number], place, skipped.get(number, 0))
        for number, place in sorted(places.items())
    ]


def _list_known(known: Mapping[int, int]) -> str:
    if not known:
        return "give a group and a topic that it reads; see `jobs-lib owners`"
    return f"it has read the partitions {', '.join(map(str, sorted(known)))}"
