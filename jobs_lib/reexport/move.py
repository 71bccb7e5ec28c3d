"""Move an entity to a new topic: fill that one, while live changes go to both.

copy is fed ─▶ re-export to the new topic ─▶ consumers and services move ─▶ switch
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.errors import ReexportError
from jobs_lib.kafka.places import find_places
from jobs_lib.reexport.control import read_unfinished
from jobs_lib.reexport.loading import SqlEngine
from jobs_lib.reexport.run import CHUNK, begin, load
from jobs_lib.reexport.topics import check_compacted, refuse_shared

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import psycopg

    from jobs_lib.outbox.topic import Entity, Topic
    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.reexport.control import LagLimit, Progress
    from jobs_lib.reexport.run import Engine
    from jobs_lib.reexport.window import Window
    from jobs_lib.settings import Settings


def start_move(
    database: Database,
    settings: Settings,
    entity: Entity,
    topic: Topic[Any],
    *,
    rate: int | Window,
    engine: Engine | None = None,
    chunk: int = CHUNK,
    watch_lag: LagLimit | None = None,
) -> Progress:
    """Fill a new topic with all states of an entity, or go on with that.

    From now on until :func:`end_move`, each change that is sent to the entity's topic
    is sent to the new one, too.

    Args:
        database: holds the entity's table and the library's schema.
        settings: where Kafka is.
        entity: what ``@app.entity`` declared.
        topic: the new one, as ``app.topic`` declared it.
        rate: as for :func:`jobs_lib.reexport.start`.
        engine: as for :func:`jobs_lib.reexport.start`.
        chunk: keys in one job.
        watch_lag: as for :func:`jobs_lib.reexport.start`.

    Raises:
        ReexportError: the entity cannot be moved there.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers.
    """
    if topic.name == entity.topic.name:
        raise ReexportError(
            f"the states of {entity.name!r} are in {topic.name!r} already: leave the "
            "topic out to send them again"
        )
    refuse_shared(entity.topic, "the keys of the others would be fed as tombstones")
    find_places(settings, topic.name, "end")
    check_compacted(settings, topic.name, "it would not keep the states")
    begun = begin(
        database, entity, rate=rate, chunk=chunk, watch_lag=watch_lag, topic=topic
    )
    return load(database, begun, engine or SqlEngine())


def end_move(
    database: Database, entity: Entity, topic: Topic[Any], *, give_up: bool = False
) -> str:
    """End the feeding of a new topic from the former one; returns the former topic.

    Everything that was sent to the former topic has reached the new one then, unless
    the move is given up.

    Args:
        database: holds the library's schema.
        entity: what ``@app.entity`` declared.
        topic: the new one.
        give_up: end it although the new topic lacks keys or changes.

    Raises:
        ReexportError: the new topic is not filled, or was filled before a re-export to
            the former one, or changes for it are on their way; or a re-export to it
            goes on, and the move shall be given up.
    """
    queries = database.queries
    values = {"entity": entity.name, "copy": topic.name}
    with database.connect("re-export") as connection, connection.transaction():
        found = connection.execute(queries["lock_copy"], values).fetchone()
        if found is None:
            raise ReexportError(
                f"{topic.name!r} is fed from no topic of {entity.name!r}: `jobs-lib "
                f"reexport start {entity.name} --topic {topic.declared} --rate N` "
                "begins that"
            )
        former = str(found[0])
        if give_up:
            _refuse_unended(connection, queries, entity, topic)
        else:
            _refuse_unfilled(connection, queries, entity, topic, former)
            _refuse_waiting(connection, queries, [former, topic.name])
        connection.execute(queries["end_copy"], values)
    return former


def _refuse_unended(
    connection: psycopg.Connection[Any],
    queries: Queries,
    entity: Entity,
    topic: Topic[Any],
) -> None:
    found = read_unfinished(connection, queries, entity.name)
    if found is not None and found.topic == topic.name:
        raise ReexportError(
            f"the re-export {found.id} to {topic.name!r} has not ended: end it with "
            f"`jobs-lib reexport cancel {entity.name}`, and run this again"
        )


def _refuse_unfilled(
    connection: psycopg.Connection[Any],
    queries: Queries,
    entity: Entity,
    topic: Topic[Any],
    former: str,
) -> None:
    # The app may declare the entity with the new topic already.
    goal = f" --topic {topic.declared}" if entity.topic.name == former else ""
    again = f"`jobs-lib reexport start {entity.name}{goal} --rate N`"
    values = {"entity": entity.name, "copy": topic.name}
    (filled,) = connection.execute(queries["find_copy_filling"], values).fetchone() or (
        None,
    )
    if filled is None:
        raise ReexportError(
            f"the re-export that fills {topic.name!r} has not finished, so keys are "
            f"missing there: see `jobs-lib reexport status {entity.name}`, and if it "
            f"was cancelled, {again} begins it again"
        )
    (alone,) = connection.execute(
        queries["find_uncopied"],
        {"entity": entity.name, "topic": former, "after": filled},
    ).fetchone() or (None,)
    if alone is not None:
        raise ReexportError(
            f"the re-export {alone} sent states to {former!r} alone after {filled} had "
            f"filled {topic.name!r}, so the new topic may have older ones: {again} "
            "sends them there, too; then run this again"
        )


def _refuse_waiting(
    connection: psycopg.Connection[Any], queries: Queries, topics: Sequence[str]
) -> None:
    for name in topics:
        row = connection.execute(
            queries["has_rows_of_topic"], {"topic": name}
        ).fetchone()
        if row != (False,):
            raise ReexportError(
                f"rows for {name!r} wait in the outbox or in a re-export, or are held, "
                "and their changes must reach the new topic: stop writing to the "
                "former one, see `jobs-lib outbox status` and `jobs-lib reexport "
                "list`, and run this again"
            )
