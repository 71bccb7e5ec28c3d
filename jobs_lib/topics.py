"""Topics as they are recorded for the origins of jobs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib.errors import TopicError
from jobs_lib.kafka.client import count_partitions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.app import App
    from jobs_lib.db import Queries


_PATIENCE = 30.0
"""Seconds for open transactions that have enqueued jobs with groups."""


def declare_topic(
    app: App,
    topic: str,
    *,
    home: bool = False,
    partitions: int | None = None,
    wait: float = _PATIENCE,
) -> None:
    """Record a topic, and how many partitions count for the origins of its groups.

    Discarded jobs of groups move to a new home topic, and run there when retried.

    Args:
        app: whose database and Kafka.
        topic: the topic's name.
        home: whether groups get their origins from it.
        partitions: defaults to what Kafka has; an existing record is never changed.
        wait: seconds for open transactions that have enqueued jobs with groups, where
            the home moves.

    Raises:
        TopicError: Kafka has no such topic, or jobs wait under another home topic, or
            a transaction stayed open for longer; nothing is changed.
    """
    database = app.database()
    with (
        database.connect("topics") as connection,
        _told_of_open(wait),
        connection.transaction(),
    ):
        known = {
            name: (count, is_home)
            for name, count, is_home in connection.execute(
                database.queries["read_topics"]
            )
        }
        if topic not in known:
            count = partitions or count_partitions(app.settings, topic)
            if not count:
                raise TopicError(
                    f"Kafka has no topic {topic!r} at "
                    f"{app.settings.kafka_bootstrap_servers}, or does not let this "
                    "client see it: create it first, grant DESCRIBE on it, or give the "
                    "number of partitions"
                )
            connection.execute(
                database.queries["declare_topic"],
                {"topic": topic, "partitions": count},
            )
        if home and not known.get(topic, (0, False))[1]:
            # An open transaction's jobs are not to be seen yet, and count as well.
            _lock_home(connection, database.queries, wait)
            connection.execute(database.queries["move_home"], {"topic": topic})
            moved = connection.execute(database.queries["set_home"], {"topic": topic})
            if not moved.rowcount:
                raise TopicError(
                    f"{topic!r} cannot become the home topic while jobs wait under the "
                    "old one: their groups would be split. Let an executor finish them "
                    "first"
                )


def repartition(app: App, partitions: int, *, wait: float = 30.0) -> int:
    """Change how many partitions of the home topic groups live in.

    In one transaction the jobs of the groups that change their origin move with them,
    under the same ids: each group stays serial and in order. Whoever enqueues jobs with
    groups waits meanwhile. Jobs that run are fenced, and run again.

    Args:
        app: whose database and Kafka.
        partitions: the new number, which Kafka has to have already.
        wait: seconds for open transactions that have enqueued jobs with groups.

    Returns:
        How many unfinished jobs have moved.

    Raises:
        TopicError: Kafka has fewer partitions, a re-export is being loaded, or a
            transaction stayed open for longer; nothing is changed.
    """
    database = app.database()
    with database.connect("topics") as connection:
        _check_kafka(app, _read_home(connection, database.queries)[0], partitions)
        with _told_of_open(wait), connection.transaction():
            return _move(connection, database.queries, partitions, wait)


@contextmanager
def _told_of_open(wait: float) -> Iterator[None]:
    try:
        yield
    except psycopg.errors.LockNotAvailable:
        raise TopicError(
            "a transaction that has enqueued jobs with groups stayed open for more "
            f"than {wait:g} s, so nothing was changed: end it, or wait for longer"
        ) from None


def _lock_home(
    connection: psycopg.Connection[Any], queries: Queries, wait: float
) -> None:
    """Keep off whoever enqueues jobs with groups, and wait for those who have."""
    patience = {"milliseconds": str(max(1, round(wait * 1000)))}
    connection.execute(queries["wait_for_locks"], patience)
    connection.execute(queries["lock_home"])
    found = connection.execute(queries["exports_in_progress"]).fetchone()
    if found is not None:
        raise TopicError(
            f"the re-export {found[0]} is being loaded, and places its jobs by the "
            "home topic and number of partitions that it began with: wait until it is "
            "loaded, or cancel it"
        )


def _move(
    connection: psycopg.Connection[Any],
    queries: Queries,
    after: int,
    wait: float,
) -> int:
    _lock_home(connection, queries, wait)
    # Read under the lock: somebody else's move may just have ended.
    topic, before = _read_home(connection, queries)
    origins = [f"{topic}/{n}" for n in range(max(before, after))]
    asked = {"topic": topic, "before": before, "after": after}
    connection.execute(
        queries["lock_origins"], {"role": "execute", "origins": sorted(origins)}
    )
    connection.execute(queries["fence_origins"], {"origins": origins})
    moved = connection.execute(queries["move_groups"], {**asked, "origins": origins})
    connection.execute(queries["set_partitions"], asked)
    return moved.rowcount


def _read_home(
    connection: psycopg.Connection[Any], queries: Queries
) -> tuple[str, int]:
    for topic, partitions, is_home in connection.execute(queries["read_topics"]):
        if is_home:
            return topic, partitions
    raise TopicError("no home topic is declared: see `jobs-lib topics declare`")


def _check_kafka(app: App, topic: str, partitions: int) -> None:
    if not app.settings.kafka_bootstrap_servers:
        return
    there = count_partitions(app.settings, topic)
    if 0 < there < partitions:
        raise TopicError(
            f"the topic {topic!r} has {there} partitions in Kafka, fewer than "
            f"{partitions}: nobody would own the origins of the others. Add partitions "
            "to the topic first"
        )
