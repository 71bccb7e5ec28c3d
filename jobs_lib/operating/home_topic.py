"""Record topics and their partitions for the origins of jobs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import psycopg

from jobs_lib.errors import TopicError
from jobs_lib.kafka.client import count_partitions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.app import App
    from jobs_lib.postgres.queries import Queries


_PATIENCE = 30.0
"""Seconds to wait for open transactions that have enqueued jobs with groups."""


def declare_topic(
    app: App,
    topic: str,
    *,
    home: bool = False,
    move: bool = False,
    partitions: int | None = None,
    wait: float = _PATIENCE,
) -> int:
    """Record a topic, and how many of its partitions are origins of groups.

    If another topic is the home and jobs wait, ``move`` moves the jobs of groups to the
    new home in the same transaction, under the same ids, as :func:`repartition` does.
    Discarded jobs of groups always move, and run there when retried.

    Args:
        app: gives the database and Kafka.
        topic: the topic's name.
        home: whether groups get their origins from it.
        move: whether it may become the home while jobs wait.
        partitions: defaults to what Kafka has; an existing record is never changed.
        wait: seconds to wait for open transactions that have enqueued jobs with groups,
            if the home moves.

    Returns:
        The number of unfinished jobs that have moved.

    Raises:
        TopicError: Kafka has no such topic, or jobs wait under another home topic and
            must not move, or a re-export is being loaded, or a transaction stayed open
            for longer; nothing is changed.
    """
    database = app.database()
    with (
        database.connect("topics", answer_within=database.timeout) as connection,
        _explain_open_transactions(wait),
        connection.transaction(),
    ):
        known = {
            name: (count, is_home)
            for name, count, is_home in connection.execute(
                database.queries["read_topics"]
            )
        }
        count, is_home = known.get(topic, (0, False))
        if not count:
            count = partitions or count_partitions(app.settings, topic)
            if not count:
                raise TopicError(
                    f"Kafka has no topic {topic!r} at "
                    f"{app.settings.kafka_bootstrap_servers}, or does not let this "
                    "client see it: create it first, as `jobs-lib topics apply` does, "
                    "grant DESCRIBE on it, or give the number of partitions"
                )
            connection.execute(
                database.queries["declare_topic"],
                {"topic": topic, "partitions": count},
            )
        if not home or is_home:
            return 0
        # A move may take long.
        connection.answer_within = None
        # Jobs of open transactions count as well, though they are not visible yet.
        _lock_home(connection, database.queries, wait)
        return _move_home(connection, database.queries, (topic, count), move)


def _move_home(
    connection: psycopg.Connection[Any],
    queries: Queries,
    to: tuple[str, int],
    move: bool,
) -> int:
    # Read under the lock: several processes of a service start at the same time.
    before = _find_home(connection, queries)
    if before == to:
        return 0
    moved = 0
    if before is not None:
        has_jobs = connection.execute(queries["has_jobs"]).fetchone() == (True,)
        if has_jobs and not move:
            raise TopicError(
                f"{to[0]!r} cannot become the home topic by itself while jobs wait "
                f"under {before[0]!r}: their groups would be split. `jobs-lib topics "
                f"declare MODULE:APP {to[0]} --home` moves them with their groups"
            )
        moved = _move_groups(connection, queries, before, to)
    connection.execute(queries["unset_home"])
    connection.execute(queries["set_home"], {"topic": to[0]})
    return moved


def repartition(app: App, partitions: int, *, wait: float = 30.0) -> int:
    """Change how many partitions of the home topic are origins of groups.

    Groups whose origin changes move with their jobs, in one transaction and under the
    same ids: each group stays serial and in order. Enqueuing jobs with groups waits
    meanwhile. Running jobs are fenced, and run again. The present number changes
    nothing.

    Args:
        app: gives the database and Kafka.
        partitions: the new number; Kafka must already have as many.
        wait: seconds to wait for open transactions that have enqueued jobs with groups.

    Returns:
        The number of unfinished jobs that have moved.

    Raises:
        TopicError: Kafka has fewer partitions, a re-export is being loaded, or a
            transaction stayed open for longer; nothing is changed.
    """
    database = app.database()
    with database.connect("topics", answer_within=database.timeout) as connection:
        _check_kafka(app, _read_home(connection, database.queries)[0], partitions)
        # A move may take long.
        connection.answer_within = None
        with _explain_open_transactions(wait), connection.transaction():
            return _move(connection, database.queries, partitions, wait)


@contextmanager
def _explain_open_transactions(wait: float) -> Iterator[None]:
    try:
        yield
    except psycopg.errors.LockNotAvailable:
        raise TopicError(
            "a transaction that has enqueued jobs with groups stayed open for more "
            f"than {wait:g} s, so nothing was changed: end it, or wait longer"
        ) from None


def _lock_home(
    connection: psycopg.Connection[Any], queries: Queries, wait: float
) -> None:
    """Block enqueuing jobs with groups, and wait for transactions that have done so."""
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
    # Read under the lock: another process's move may just have ended.
    topic, before = _read_home(connection, queries)
    if before == after:
        return 0
    moved = _move_groups(connection, queries, (topic, before), (topic, after))
    connection.execute(queries["set_partitions"], {"topic": topic, "after": after})
    return moved


def _move_groups(
    connection: psycopg.Connection[Any],
    queries: Queries,
    before: tuple[str, int],
    after: tuple[str, int],
) -> int:
    """Move the jobs of groups between two homes, each a topic and its partitions."""
    origins = sorted(
        {f"{topic}/{n}" for topic, count in (before, after) for n in range(count)}
    )
    connection.execute(queries["lock_origins"], {"role": "execute", "origins": origins})
    connection.execute(queries["fence_origins"], {"origins": origins})
    asked = {
        "origins": origins,
        "from": before[0],
        "before": before[1],
        "to": after[0],
        "after": after[1],
    }
    moved = connection.execute(queries["move_groups"], asked).fetchone()
    return cast("tuple[int]", moved)[0]


def _read_home(
    connection: psycopg.Connection[Any], queries: Queries
) -> tuple[str, int]:
    home = _find_home(connection, queries)
    if home is None:
        raise TopicError("no home topic is declared: see `jobs-lib topics declare`")
    return home


def _find_home(
    connection: psycopg.Connection[Any], queries: Queries
) -> tuple[str, int] | None:
    for topic, partitions, is_home in connection.execute(queries["read_topics"]):
        if is_home:
            return topic, partitions
    return None


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
