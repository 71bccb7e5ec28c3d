"""Rebuild a topic: delete what it has, and send all states of its entity again.

    note ─▶ let it delete ─▶ delete up to the noted ends ─▶ former settings ─▶ re-export

The note is in the database before anything changes in Kafka, and every step may be done
twice. So an interrupted rebuild goes on with the next call, whatever was done.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import ReexportError
from jobs_lib.kafka.client import read_topic_ids
from jobs_lib.kafka.lag import find_readers
from jobs_lib.kafka.places import find_committed_ends
from jobs_lib.kafka.topic_settings import change, delete_before, read_own
from jobs_lib.reexport.control import read_progress, read_unfinished
from jobs_lib.reexport.loading import SqlEngine
from jobs_lib.reexport.run import CHUNK, begin, check_asked, load
from jobs_lib.reexport.topics import check_compacted, refuse_shared

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from uuid import UUID

    import psycopg

    from jobs_lib.outbox.topic import Entity
    from jobs_lib.postgres.database import Database
    from jobs_lib.reexport.control import LagLimit, Progress
    from jobs_lib.reexport.run import Engine
    from jobs_lib.reexport.window import Window
    from jobs_lib.settings import Settings

_DELETING = {
    # Kafka cuts only the logs of topics that may delete. What is sent meanwhile stays:
    # retention deletes nothing.
    "cleanup.policy": "compact,delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
}


@dataclass(frozen=True, slots=True)
class Rebuild:
    """A rebuild that has begun."""

    topic: str
    topic_id: UUID | None
    ends: dict[int, int]
    """The offsets before which records are deleted, by partition."""
    former: dict[str, str | None]
    """The topic's own settings; None for one that it has not."""
    last_reexport: int
    """Re-exports up to this id began before the topic was empty."""
    emptied: bool
    begun: bool
    """Whether the re-export that fills the topic has begun."""
    filling: bool
    """Whether that one has not ended."""
    began_at: datetime
    """It tells this rebuild of the entity from the next one."""


def rebuild(
    database: Database,
    settings: Settings,
    entity: Entity,
    *,
    rate: int | Window,
    engine: Engine | None = None,
    chunk: int = CHUNK,
    watch_lag: LagLimit | None = None,
    although_behind: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Empty the topic of an entity and send all its states again, or go on with that.

    What is sent while it runs stays in the topic. Between the deletion and the end of
    the re-export, who reads the topic from its start misses keys. Who has read it keeps
    what it has: keys that are gone without a tombstone stay there.

    Args:
        database: holds the entity's table and the library's schema.
        settings: where Kafka is.
        entity: what ``@app.entity`` declared.
        rate: as for :func:`jobs_lib.reexport.start`.
        engine: as for :func:`jobs_lib.reexport.start`.
        chunk: keys in one job.
        watch_lag: as for :func:`jobs_lib.reexport.start`.
        although_behind: whether to delete records that a group has not read yet.
        on_progress: as for :func:`jobs_lib.reexport.start`.

    Raises:
        AccessError: Kafka denies a right.
        ReexportError: it cannot be rebuilt as asked, or a group is behind.
        TopicError: the topic does not exist, or Kafka refuses a step.
        UnavailableError: no broker answers.
    """
    check_asked(rate, chunk, watch_lag)
    found = _find(database, entity)
    if found is not None and not found.filling:
        found = _keep_if_same(database, settings, entity, found)
    if found is None:
        found = _note(database, settings, entity, although_behind)
    if not found.emptied:
        change(settings, found.topic, _DELETING)
        delete_before(settings, found.topic, found.ends)
        change(settings, found.topic, found.former)
        found = _note_emptied(database, entity, found)
    if not found.filling:
        _refuse_older(database, entity, found)
        ended = _find_ended(database, entity, found)
        if ended is not None:
            _end(database, entity, found)
            return ended
    begun = begin(database, entity, rate=rate, chunk=chunk, watch_lag=watch_lag)
    with database.connect("re-export") as connection:
        begun_by = {"reexport": begun.id, "began_at": found.began_at}
        _run(connection, database, entity, "note_begun", **begun_by)
    return load(database, begun, engine or SqlEngine(), on_progress=on_progress)


def _find(database: Database, entity: Entity) -> Rebuild | None:
    with database.connect("re-export") as connection:
        row = _run(connection, database, entity, "find_rebuild").fetchone()
    if row is None:
        return None
    topic, topic_id, ends, *others = row
    numbers = {int(number): end for number, end in ends.items()}
    return Rebuild(topic, topic_id, numbers, *others)


def _keep_if_same(
    database: Database, settings: Settings, entity: Entity, found: Rebuild
) -> Rebuild | None:
    """Forget a rebuild that has ended, or whose topic was made anew meanwhile."""
    if found.begun:
        _end(database, entity, found)
        return None
    if found.topic != entity.topic.name:
        raise ReexportError(
            f"a rebuild of {found.topic!r} has not ended, and {entity.name!r} is "
            f"declared for {entity.topic.name!r} now: run it once more with the former "
            "declaration, which also gives that topic its settings back"
        )
    ids = read_topic_ids(settings, [found.topic])
    if found.topic_id is None or ids.get(found.topic) in (None, found.topic_id):
        return found
    _end(database, entity, found)
    return None


def _note(
    database: Database, settings: Settings, entity: Entity, although_behind: bool
) -> Rebuild:
    refuse_shared(entity.topic, "those of the others would be deleted for good")
    topic = entity.topic.name
    ends = find_committed_ends(settings, topic)
    former = read_own(settings, topic, _DELETING)
    if former == _DELETING:
        # The note of an interrupted rebuild was lost with the server's last commits.
        former = {name: entity.topic.config.get(name) for name in _DELETING}
    check_compacted(settings, topic, "its records end by retention")
    if not although_behind:
        _refuse_lag(settings, topic)
    values = {
        "entity": entity.name,
        "topic": topic,
        "topic_id": read_topic_ids(settings, [topic]).get(topic),
        "ends": json.dumps(ends),
        "former": json.dumps(former),
    }
    with database.connect("re-export") as connection, connection.transaction():
        unfinished = read_unfinished(connection, database.queries, entity.name)
        if unfinished is not None:
            # A part of its records would be deleted, and not sent again.
            raise ReexportError(
                f"the re-export {unfinished.id} of {entity.name!r} has not ended: wait "
                f"for its end, or end it with `jobs-lib reexport cancel {entity.name}`"
            )
        connection.execute(database.queries["note_rebuild"], values)
    found = _find(database, entity)
    if found is None:
        raise ReexportError(
            f"another rebuild of {entity.name!r} ended meanwhile: look at `jobs-lib "
            f"reexport status {entity.name}`"
        )
    return found


def _note_emptied(database: Database, entity: Entity, found: Rebuild) -> Rebuild:
    """Note that the topic is empty; returns what is known of the rebuild now.

    Without the note nobody knows which re-exports began after the deletion.
    """
    with database.connect("re-export") as connection:
        _run(connection, database, entity, "note_emptied", began_at=found.began_at)
    noted = _find(database, entity)
    if noted is None or noted.began_at != found.began_at:
        raise ReexportError(
            f"what was noted of the rebuild of {found.topic!r} is gone: another call "
            "has ended it, or the server has lost its last commits. The topic was "
            "emptied, and may lack keys: run this again"
        )
    return noted


def _refuse_lag(settings: Settings, topic: str) -> None:
    readers = find_readers(settings, topic, every=True)
    behind = [one for one in readers.groups if one.lag]
    if behind:
        told = ", ".join(f"{one.group} by {one.lag:,} records" for one in behind)
        raise ReexportError(
            f"groups that read {topic!r} are behind: {told}. They would miss what is "
            "deleted, and keys whose tombstones are among that would stay with them: "
            "wait for them, or say --although-behind"
        )


def _refuse_older(database: Database, entity: Entity, found: Rebuild) -> None:
    with database.connect("re-export") as connection:
        unfinished = read_unfinished(connection, database.queries, entity.name)
    if unfinished is not None and unfinished.id <= found.last_reexport:
        raise ReexportError(
            f"the re-export {unfinished.id} of {entity.name!r} began before the topic "
            f"was empty: end it with `jobs-lib reexport cancel {entity.name}`, and run "
            "this again"
        )


def _find_ended(database: Database, entity: Entity, found: Rebuild) -> Progress | None:
    """The re-export that filled the topic, if it has ended and nobody noted it."""
    values = {"topic": found.topic, "after": found.last_reexport}
    with database.connect("re-export") as connection:
        row = _run(connection, database, entity, "find_filled", **values).fetchone()
        if row is None:
            return None
        return read_progress(connection, database.queries, row[0])


def _run(
    connection: psycopg.Connection[Any],
    database: Database,
    entity: Entity,
    query: str,
    **values: object,
) -> psycopg.Cursor[Any]:
    parameters = {"entity": entity.name, **values}
    return connection.execute(database.queries[query], parameters)


def _end(database: Database, entity: Entity, found: Rebuild) -> None:
    with database.connect("re-export") as connection:
        _run(connection, database, entity, "end_rebuild", began_at=found.began_at)
