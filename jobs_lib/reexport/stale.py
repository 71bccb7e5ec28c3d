"""Remove stale keys: those that the topic has and the entity's table has not.

    begin ─▶ ends of the topic ─▶ its keys ─▶ less the table's keys ─▶ less those whose
    tombstone is on its way ─▶ chunk jobs ─▶ as any other

It begins first: what leaves live from then on is noted, and a key of which something
has left is not sent. Otherwise its tombstone might follow a newer one.

The ends are taken before the table is read. So a key that the topic has and the table
has not was deleted behind the application, or is deleted just now. Those that are
deleted just now have a row in the outbox, or a record behind the ends. The state of the
others is looked up once more when their rows leave: a key that came back is sent with
its state, and one that is gone becomes a tombstone.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from psycopg import OperationalError, Rollback

from jobs_lib.errors import ReexportError, UnavailableError
from jobs_lib.kafka.checks import is_short
from jobs_lib.kafka.keys import Keys, cut, read_keys
from jobs_lib.kafka.places import find_places, find_settled_ends
from jobs_lib.outbox.finishing import finish_if_done
from jobs_lib.partitioner import choose_partition
from jobs_lib.reexport.chunks import STALE_TYPE, choose_due
from jobs_lib.reexport.control import (
    LagLimit,
    Progress,
    Unfinished,
    read_progress,
    read_unfinished,
    set_rate,
    watch_lag,
)
from jobs_lib.reexport.loading import state_chunks, telling_full_disk
from jobs_lib.reexport.run import (
    CHUNK,
    check_asked,
    read_home,
    set_lag_limit,
    settle_rate,
)
from jobs_lib.reexport.source import find_source
from jobs_lib.reexport.topics import check_compacted, refuse_shared

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime
    from typing import BinaryIO

    import psycopg

    from jobs_lib.outbox.topic import Entity
    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.reexport.window import Window
    from jobs_lib.settings import Settings

_LARGEST = 2**63 - 1
_NULL = "\\N"
_COPY_BYTES = 65_536
_UNCOUNTED = 60_000
"""The records a minute until the keys that a window is for are counted. Only changes
that transactions give to the re-export leave until then."""


@dataclass(frozen=True, slots=True)
class Stale:
    """The stale keys of a topic."""

    count: int
    unreadable: int
    """Records whose keys no row of the outbox could have, so they stay: there is none,
    or it is not UTF-8, has NUL, or is too long."""
    keys: Iterable[tuple[str, int | None]]
    """Each key, with the highest version that a record of it has. To be read once."""
    ends: Mapping[int, int]
    """The offsets up to which the topic was read, by partition."""


class Identity(NamedTuple):
    """A re-export, and no other one: a server that lost commits gives ids anew."""

    id: int
    started_at: datetime


class Finder(Protocol):
    """Finds stale keys: in the database, or by Spark."""

    def find(
        self, database: Database, settings: Settings, entity: Entity
    ) -> AbstractContextManager[Stale]:
        """Compare the topic with the table; the keys may be read until it is left."""


class SqlFinder:
    """Reads the topic in this process, and compares it in the database."""

    @contextmanager
    def find(
        self, database: Database, settings: Settings, entity: Entity
    ) -> Iterator[Stale]:
        """Compare the topic with the table."""
        topic = entity.topic.name
        ends = find_settled_ends(settings, topic)
        starts = find_places(settings, topic, "start")
        # A file, and not the database: reading the topic may take an hour, and a
        # transaction of an hour would keep all dead rows of the database.
        with tempfile.TemporaryFile() as file:
            unreadable = 0
            for piece in cut(starts, ends):
                for block in read_keys(settings, topic, piece):
                    unreadable += _write_lines(block, file)
            file.seek(0)
            with (
                telling_full_disk("its table and the topic cannot be compared"),
                database.connect("re-export") as connection,
            ):
                found = _compare(connection, database.queries, entity, file)
        yield Stale(len(found), unreadable, found, ends)


def remove_stale(
    database: Database,
    settings: Settings,
    entity: Entity,
    *,
    rate: int | Window,
    finder: Finder | None = None,
    chunk: int = CHUNK,
    watch_lag: LagLimit | None = None,
) -> Progress:
    """Send tombstones for keys that only the topic has, or go on with that.

    One transaction loads all keys after the topic and the table are compared, so an
    interrupted call has loaded either none or all of them. If these keys are being
    removed already, that re-export gets the new rate.

    Args:
        database: holds the entity's table and the library's schema.
        settings: where Kafka is.
        entity: what ``@app.entity`` declared.
        rate: as for :func:`jobs_lib.reexport.start`.
        finder: compares topic and table. Defaults to the database.
        chunk: keys in one job.
        watch_lag: as for :func:`jobs_lib.reexport.start`.

    Raises:
        ReexportError: they cannot be removed as asked.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers.
    """
    check_asked(rate, chunk, watch_lag)
    unfinished = _find_unfinished(database, entity)
    if unfinished is not None and unfinished.has_ranges:
        return _go_on(database, entity, unfinished.id, rate, watch_lag)
    check_topic(settings, entity)
    # One that was interrupted before its keys were loaded has noted all since then.
    this = (
        _begin(database, entity, rate)
        if unfinished is None
        else Identity(unfinished.id, unfinished.started_at)
    )
    try:
        with (finder or SqlFinder()).find(database, settings, entity) as stale:
            loaded = _load(
                database, settings, entity, this, stale, rate, chunk, watch_lag
            )
    except BaseException:
        # One that another call has begun is still compared by that. Or that was killed,
        # and then the next call goes on with it.
        if unfinished is None:
            # Without the database the next call goes on, as after a kill. The first
            # error is the one to be told.
            with suppress(UnavailableError, OperationalError):
                _give_up(database, this)
        raise
    return loaded or _go_on(database, entity, this.id, rate, watch_lag)


def _give_up(database: Database, this: Identity) -> None:
    queries = database.queries
    with database.connect("re-export") as connection:
        connection.execute(queries["give_up_stale"], _name(this))
        finish_if_done(connection, queries, this.id)


def _name(this: Identity) -> dict[str, Any]:
    return {"reexport": this.id, "started_at": this.started_at}


def check_topic(settings: Settings, entity: Entity) -> None:
    """Refuse a topic whose keys cannot be compared with the table of an entity.

    Raises:
        ReexportError: it is not compacted, or holds states of other entities.
        TopicError: it does not exist, or is not visible.
        UnavailableError: no broker answers.
    """
    topic = entity.topic
    # Raises the reason if it is missing; its settings would not say so.
    find_places(settings, topic.name, "end")
    check_compacted(settings, topic.name, "a tombstone would remove nothing")
    refuse_shared(topic, "nobody can say whose a key is")


def version_of_end(highest: int | None, versioned: bool) -> int | None:
    """The version of the tombstone of a key, which follows all that the topic has.

    Args:
        highest: of the key's records; None if none of them has one.
        versioned: whether the values of the topic have versions.
    """
    if highest is not None:
        return min(highest + 1, _LARGEST)
    # Any version is newer than none, and the key may come back with the first one.
    return 0 if versioned else None


def is_storable(key: str) -> bool:
    """Whether a row of the outbox can have this key."""
    return bool(key) and "\0" not in key and is_short(key)


def _find_unfinished(database: Database, entity: Entity) -> Unfinished | None:
    """Find the re-export of stale keys that has not ended; none other may go on."""
    with database.connect("re-export") as connection:
        found = read_unfinished(connection, database.queries, entity.name)
    if found is not None and not found.stale:
        raise ReexportError(
            f"the re-export {found.id} of {entity.name!r} has not ended, and there is "
            "one at a time: wait for its end, or end it with `jobs-lib reexport cancel "
            f"{entity.name}`"
        )
    return found


def _begin(database: Database, entity: Entity, rate: int | Window) -> Identity:
    values = {
        "entity": entity.name,
        "topic": entity.topic.name,
        "rate": rate if isinstance(rate, int) else _UNCOUNTED,
    }
    # In one transaction: the home topic gets no more partitions from here on.
    with database.connect("re-export") as connection, connection.transaction():
        read_home(connection, database.queries)
        started = connection.execute(database.queries["start_stale"], values).fetchone()
    if started is None:
        raise ReexportError(
            f"another re-export of {entity.name!r} began meanwhile: run this again"
        )
    return Identity(*started)


def _go_on(
    database: Database,
    entity: Entity,
    reexport: int,
    rate: int | Window,
    limit: LagLimit | None,
) -> Progress:
    with database.connect("re-export") as connection:
        progress = read_progress(connection, database.queries, reexport)
    if progress.state == "finished":
        return progress
    if limit is not None:
        watch_lag(database, entity.name, limit)
    return set_rate(database, entity.name, settle_rate(rate, progress.left))


def _load(
    database: Database,
    settings: Settings,
    entity: Entity,
    this: Identity,
    stale: Stale,
    rate: int | Window,
    chunk: int,
    limit: LagLimit | None,
) -> Progress | None:
    """Load all keys in one transaction; None if another call has."""
    queries, topic, reexport = database.queries, entity.topic, this.id
    loaded: dict[str, Any] = {"reexport": reexport, "keys": 0}
    with database.connect("re-export") as connection:
        keys = _leave_out_recent(connection, queries, settings, entity, stale)
        with (
            telling_full_disk("no stale key is loaded"),
            connection.transaction() as transaction,
        ):
            connection.execute(queries["limit_loader"])
            home, partitions = read_home(connection, queries)
            if _is_loaded(connection, queries, entity, this):
                return None
            given = read_progress(connection, queries, reexport).left
            per_minute = settle_rate(rate, stale.count + given)
            (now,) = connection.execute(queries["database_time"]).fetchone() or ()
            chunks = make_chunks(keys, partitions, chunk, versioned=topic.versioned)
            with (
                connection.cursor() as cursor,
                cursor.copy(queries["copy_jobs"]) as copy,
            ):
                for partition, some in chunks:
                    due = choose_due(loaded["keys"], per_minute, chunk, now)
                    line = encode_stale(reexport, some, f"{home}/{partition}", due)
                    copy.write(line)
                    loaded["keys"] += len(some)
            # Only now: a relay that waits for the lock sends no live rows either.
            connection.execute(queries["lock_reexport"], loaded)
            if _is_loaded(connection, queries, entity, this):
                raise Rollback(transaction)
            connection.execute(
                queries["change_rate"], {"reexport": reexport, "rate": per_minute}
            )
            set_lag_limit(connection, queries, reexport, limit)
            connection.execute(queries["add_loaded_range"], loaded)
            connection.execute(queries["count_range"], loaded)
            finish_if_done(connection, queries, reexport)
            return read_progress(connection, queries, reexport)
    return None


def _is_loaded(
    connection: psycopg.Connection[Any],
    queries: Queries,
    entity: Entity,
    this: Identity,
) -> bool:
    """Whether another call has loaded the keys.

    Raises:
        ReexportError: the re-export has ended.
    """
    found = connection.execute(queries["look_at_stale"], _name(this)).fetchone()
    is_open, is_loaded = found or (False, False)
    if not (is_open or is_loaded):
        raise ReexportError(
            f"the re-export {this.id} of {entity.name!r} was ended meanwhile, or the "
            "server has lost its last commits, and nothing is loaded: run this again"
        )
    return bool(is_loaded)


def make_chunks(
    keys: Iterable[tuple[str, int | None]],
    partitions: int,
    chunk: int,
    *,
    versioned: bool,
) -> Iterator[tuple[int, list[tuple[str, int | None]]]]:
    """Yield a partition of the home topic, and some of its keys with their versions."""
    waiting: defaultdict[int, list[tuple[str, int | None]]] = defaultdict(list)
    for key, highest in keys:
        partition = choose_partition(key, partitions)
        waiting[partition].append((key, version_of_end(highest, versioned)))
        if len(waiting[partition]) == chunk:
            yield partition, waiting.pop(partition)
    yield from waiting.items()


def encode_stale(
    reexport: int,
    keys: Sequence[tuple[str, int | None]],
    origin: str,
    due: datetime | None = None,
) -> bytes:
    """Encode a chunk job as a line of COPY's text format."""
    state, run_at = state_chunks(due)
    names, versions = zip(*keys, strict=True)
    payload = {"reexport": reexport, "keys": names, "versions": versions}
    # JSON has no raw tab or newline; backslashes are COPY's own escape.
    text = json.dumps(payload, ensure_ascii=False).replace("\\", "\\\\")
    return f"{origin}\t{STALE_TYPE}\t\\N\t{state}\t{text}\t{run_at}\t\\N\n".encode()


def _leave_out_recent(
    connection: psycopg.Connection[Any],
    queries: Queries,
    settings: Settings,
    entity: Entity,
    stale: Stale,
) -> Iterator[tuple[str, int | None]]:
    """Leave out keys whose own tombstone is on its way, or behind the first ends.

    It may have a higher version than ours, which would follow it.
    """
    topic = entity.topic.name
    # The outbox before the new ends: a row that has left by now is before those.
    rows = connection.execute(queries["waiting_keys"], {"topic": topic}).fetchall()
    recent = {key for (key,) in rows}
    ends = find_settled_ends(settings, topic)
    for piece in cut(stale.ends, ends, oldest=False):
        for block in read_keys(settings, topic, piece):
            recent.update(key for key in block.keys if key is not None)
    return (one for one in stale.keys if one[0] not in recent)


def _write_lines(block: Keys, file: BinaryIO) -> int:
    """Write records as lines of COPY's text format; returns how many are unreadable."""
    partition, offsets, keys, versions, tombstones, _ = block
    texts = _escape(keys)
    lines = [
        f"{partition}\t{offset}\t{text}\t{_NULL if version is None else version}"
        f"\t{'ft'[tombstone]}\n"
        for offset, text, version, tombstone in zip(
            offsets, texts, versions, tombstones, strict=True
        )
        if text is not None
    ]
    file.write("".join(lines).encode())
    return len(offsets) - len(lines)


def _escape(keys: Sequence[str | None]) -> list[str | None]:
    """Escape keys for COPY; None where one is unreadable."""
    storable = [key if key and is_storable(key) else None for key in keys]
    joined = "".join(key for key in storable if key)
    # Seldom any key has one of these characters.
    for raw, escaped in _ESCAPES:
        if raw in joined:
            storable = [key and key.replace(raw, escaped) for key in storable]
    return storable


_ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))


def _compare(
    connection: psycopg.Connection[Any],
    queries: Queries,
    entity: Entity,
    file: BinaryIO,
) -> list[tuple[str, int | None]]:
    with connection.transaction():
        connection.execute(queries["settle_text_forms"])
        source = find_source(connection, queries, entity)
        connection.execute(queries["make_topic_keys"])
        query = queries["copy_topic_keys"]
        with connection.cursor() as cursor, cursor.copy(query) as copy:
            while block := file.read(_COPY_BYTES):
                copy.write(block)
        connection.execute(queries["analyze_topic_keys"])
        return connection.execute(source.query(queries, "source_stale")).fetchall()
