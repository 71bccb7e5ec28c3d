"""Load one range: read its keys and insert its chunk jobs, in one transaction."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from psycopg.errors import DiskFull

from jobs_lib.errors import ReexportError
from jobs_lib.kafka.checks import KEY_LIMIT, is_short
from jobs_lib.partitioner import choose_partitions
from jobs_lib.reexport.chunks import CHUNK_TYPE, choose_due
from jobs_lib.reexport.snapshot import reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    import psycopg

    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.reexport.source import Source

    ReadKeys = Callable[
        [psycopg.Connection[Any], Queries, Source, str | None, str | None], "Keys"
    ]

_COPY_CHUNKS = 500


@dataclass(frozen=True, slots=True)
class Loading:
    """The parameters of a loader: plain data, so that they can be sent to a task."""

    reexport: int
    started_at: datetime
    source: Source | None
    """The table; None if the states are staged."""
    chunk: int
    """Keys in one chunk job, at most."""
    home: str
    """The topic whose partitions are the origins of the chunk jobs."""
    partitions: int
    snapshot: str | None = None
    """The server's name of the snapshot that shows the keys; None: the latest state."""


class Keys(Protocol):
    """The keys of one range, each once."""

    def __len__(self) -> int:
        """How many they are."""

    def check(self) -> None:
        """Refuse keys that the outbox cannot store: no retry could write their chunk.

        Raises:
            ReexportError: a key is empty or too long.
        """

    def encode(
        self, loading: Loading, due: datetime | None = None
    ) -> Iterator[bytes | memoryview]:
        """Yield their chunk jobs as lines of COPY's text format, in blocks.

        Args:
            loading: the parameters.
            due: when the jobs are due; None: at once.
        """


class KeyList(list[str]):
    """Keys that are handled one after the other, which needs no further package."""

    @classmethod
    def read(
        cls,
        connection: psycopg.Connection[Any],
        queries: Queries,
        source: Source,
        lower: str | None,
        upper: str | None,
    ) -> KeyList:
        """Read the keys from one bound up to the other."""
        query = source.keys_between(queries, lower, upper)
        return cls(key for (key,) in connection.execute(query).fetchall())

    def check(self) -> None:
        """Refuse keys that the outbox cannot store."""
        if "" in self:
            raise refuse_empty_key()
        for key in self:
            if not is_short(key):
                raise refuse_long_key(len(key))

    def encode(self, loading: Loading, due: datetime | None = None) -> Iterator[bytes]:
        """Yield their chunk jobs as lines of COPY's text format, in blocks."""
        partitions = choose_partitions(self, loading.partitions)
        return encode_chunks(loading, self, partitions, due)


class Found(NamedTuple):
    """What a loader finds of a range that is to be loaded, once it has the lock."""

    lower: str | None
    upper: str | None
    due: datetime | None
    """When the chunk jobs are due; None: at once."""


@contextmanager
def telling_full_disk(what: str) -> Iterator[None]:
    """Turn the server's error that its disk is full into one with the way out.

    Args:
        what: what has come of it, for the error.

    Raises:
        ReexportError: the disk is full.
    """
    try:
        yield
    except DiskFull:
        raise ReexportError(
            f"the disk of the database is full, so {what}: make room there, and start "
            "again. What was loaded before stays"
        ) from None  # its context shows keys


def load_range(
    connection: psycopg.Connection[Any],
    queries: Queries,
    loading: Loading,
    number: int,
    read: ReadKeys | None = None,
) -> int | None:
    """Load one range; returns the number of keys, or None if there was nothing to do.

    One transaction, under a lock on the range's row, reads the keys, inserts the jobs
    and marks the range as loaded. So each key is in exactly one job, no matter how
    often a range is loaded, how many loaders try it at once, and where one dies.

    Args:
        connection: in autocommit mode, to the database that holds table and jobs.
        queries: for the library's schema.
        loading: the parameters.
        number: the range's number.
        read: reads the keys. By default one after the other; with Arrow they can be
            read and written in columns.

    Raises:
        ReexportError: there is no such range, or no such re-export any more; or
            another loader has taken or lost the snapshot; or the database's disk is
            full.
    """
    read, keys, source = read or KeyList.read, None, loading.source
    if source is None:
        raise ReexportError(
            f"the states of the re-export {loading.reexport} come from a DataFrame: "
            "load it with that"
        )
    if loading.snapshot is not None:
        # In a transaction of its own. One that reads an old snapshot could not update
        # rows that other loaders have changed since.
        found = lock_range(connection, queries, loading, number)
        if found is None:
            return None
        with reading(connection, queries, loading.snapshot):
            connection.execute(queries["settle_text_forms"])
            keys = read(connection, queries, source, found.lower, found.upper)
    this: dict[str, Any] = {"reexport": loading.reexport, "range": number}
    with telling_full_disk(spell_range(loading, number)), connection.transaction():
        found = lock_range(connection, queries, loading, number)
        if found is None:
            return None
        if keys is None:
            connection.execute(queries["settle_text_forms"])
            # COPY in and COPY out cannot share a connection, so the keys are read into
            # memory first. A range is small enough for that.
            keys = read(connection, queries, source, found.lower, found.upper)
        keys.check()
        with connection.cursor() as cursor, cursor.copy(queries["copy_jobs"]) as copy:
            for block in keys.encode(loading, found.due):
                copy.write(block)
        this["keys"] = len(keys)
        connection.execute(queries["mark_range_loaded"], this)
        # Last, because all loaders and the relay share this row: the lock is short.
        locked = connection.execute(queries["lock_reexport"], this).fetchone()
        if locked is not None and locked[0] != loading.snapshot:
            raise ReexportError(
                f"the re-export {loading.reexport} was started once more, with or "
                "without a snapshot, and is loaded by that start: this one has ended"
            )
        connection.execute(queries["count_range"], this)
    return len(keys)


def spell_range(loading: Loading, number: int) -> str:
    """Say that a range is not loaded, for an error."""
    return f"the range {number} of the re-export {loading.reexport} is not loaded"


def lock_range(
    connection: psycopg.Connection[Any], queries: Queries, loading: Loading, number: int
) -> Found | None:
    """Lock the range's row; return None if there is nothing to load."""
    connection.execute(queries["limit_loader"])
    found = connection.execute(
        queries["lock_range"],
        {
            "reexport": loading.reexport,
            "range": number,
            "started_at": loading.started_at,
        },
    ).fetchone()
    if found is None:
        raise ReexportError(
            f"the re-export {loading.reexport} that began at "
            f"{loading.started_at.isoformat()} has no range {number}: it was "
            "deleted, or the server has lost its last commits. Start it again"
        )
    lower, upper, loaded, state, rate, left, now = found
    if loaded or state in ("cancelled", "finished"):
        return None
    return Found(lower, upper, choose_due(left, rate, loading.chunk, now))


def encode_chunks(
    loading: Loading,
    keys: Sequence[str],
    partitions: Sequence[int],
    due: datetime | None = None,
) -> Iterator[bytes]:
    """Yield the chunk jobs of a range as lines of COPY's text format, in blocks.

    A job holds keys of one partition only and lies in that origin: where the records
    and the other jobs of these keys are, too.
    """
    keys_of: defaultdict[int, list[str]] = defaultdict(list)
    for key, partition in zip(keys, partitions, strict=True):
        keys_of[partition].append(key)
    lines: list[bytes] = []
    head, tail = frame_chunks(loading, due)
    for partition, chunk in _cut(keys_of, loading.chunk):
        # JSON has no raw tab or newline; backslashes are COPY's own escape.
        payload = json.dumps(chunk, ensure_ascii=False)
        payload = payload.replace("\\", "\\\\")
        line = f"{loading.home}/{partition}{head}{payload}{tail}"
        lines.append(line.encode())
        if len(lines) == _COPY_CHUNKS:
            yield b"".join(lines)
            lines.clear()
    yield b"".join(lines)


def frame_chunks(loading: Loading, due: datetime | None) -> tuple[str, str]:
    """Write what stands between origin and keys of a chunk job, and behind the keys."""
    state, run_at = state_chunks(due)
    head = f'{{"reexport": {loading.reexport}, "keys": '
    return f"\t{CHUNK_TYPE}\t\\N\t{state}\t{head}", f"}}\t{run_at}\t\\N\n"


def state_chunks(due: datetime | None) -> tuple[str, str]:
    """Write the state of chunk jobs, and when they are due, for COPY."""
    return ("available", "\\N") if due is None else ("scheduled", str(due))


def _cut(
    keys_of: Mapping[int, list[str]], chunk: int
) -> Iterator[tuple[int, list[str]]]:
    for partition, keys in keys_of.items():
        for start in range(0, len(keys), chunk):
            yield partition, keys[start : start + chunk]


def refuse_empty_key() -> ReexportError:
    """The error about a key that the outbox cannot store."""
    return ReexportError(
        "a key is empty: a record's key has at least one byte. Give the row a key, "
        "or declare the entity with another one"
    )


def refuse_long_key(characters: int) -> ReexportError:
    """The error about a key that no retry could write."""
    return ReexportError(
        f"a key of {characters} characters is too long: a record's key has at "
        f"most {KEY_LIMIT} bytes. Declare the entity with a shorter key"
    )


class SqlEngine:
    """Loads ranges one after the other over one connection of this process."""

    def load(self, database: Database, loading: Loading, ranges: Sequence[int]) -> None:
        """Load those of the ranges that are not loaded yet."""
        with database.connect("re-export") as connection:
            for number in ranges:
                load_range(connection, database.queries, loading, number)

    def idle(self, seconds: float) -> None:
        """Do nothing: this engine holds nothing between two calls."""
