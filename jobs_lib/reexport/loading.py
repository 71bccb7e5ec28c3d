"""Load one range: read its keys and insert its chunk jobs, in one transaction."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import ReexportError
from jobs_lib.kafka.checks import KEY_LIMIT
from jobs_lib.partitioner import choose_partitions
from jobs_lib.reexport.chunks import CHUNK_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    import psycopg

    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.reexport.source import Source

_COPY_CHUNKS = 500
_LONGEST_CHARACTER = 4
"""Bytes of UTF-8."""


@dataclass(frozen=True, slots=True)
class Loading:
    """The parameters of a loader: plain data, so that they can be sent to a task."""

    reexport: int
    started_at: datetime
    source: Source
    chunk: int
    """Keys in one chunk job, at most."""
    home: str
    """The topic whose partitions are the origins of the chunk jobs."""
    partitions: int


def load_range(
    connection: psycopg.Connection[Any],
    queries: Queries,
    loading: Loading,
    number: int,
    choose: Callable[[Sequence[str], int], Sequence[int]] = choose_partitions,
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
        choose: chooses the partitions of many keys as a producer does. Defaults to one
            key after the other; with numpy it can be done in columns.

    Raises:
        ReexportError: there is no such range, or no such re-export any more.
    """
    this: dict[str, Any] = {"reexport": loading.reexport, "range": number}
    with connection.transaction():
        found = connection.execute(
            queries["lock_range"], this | {"started_at": loading.started_at}
        ).fetchone()
        if found is None:
            raise ReexportError(
                f"the re-export {loading.reexport} that began at "
                f"{loading.started_at.isoformat()} has no range {number}: it was "
                "deleted, or the server has lost its last commits. Start it again"
            )
        lower, upper, loaded, state = found
        if loaded or state in ("cancelled", "finished"):
            return None
        connection.execute(queries["settle_text_forms"])
        keys = _read_keys(connection, queries, loading.source, lower, upper)
        _check_keys(keys)
        partitions = choose(keys, loading.partitions)
        with connection.cursor() as cursor, cursor.copy(queries["copy_jobs"]) as copy:
            for block in encode_chunks(loading, keys, partitions):
                copy.write(block)
        this["keys"] = len(keys)
        connection.execute(queries["mark_range_loaded"], this)
        # Last, because all loaders and the relay share this row: the lock is short.
        connection.execute(queries["lock_reexport"], this)
        connection.execute(queries["count_range"], this)
    return len(keys)


def encode_chunks(
    loading: Loading, keys: Sequence[str], partitions: Sequence[int]
) -> Iterator[bytes]:
    """Yield the chunk jobs of a range as lines of COPY's text format, in blocks.

    A job holds keys of one partition only and lies in that origin: where the records
    and the other jobs of these keys are, too.
    """
    keys_of: defaultdict[int, list[str]] = defaultdict(list)
    for key, partition in zip(keys, partitions, strict=True):
        keys_of[partition].append(key)
    lines: list[bytes] = []
    head = f'\t{CHUNK_TYPE}\t\\N\tavailable\t{{"reexport": {loading.reexport}, "keys": '
    for partition, chunk in _cut(keys_of, loading.chunk):
        # JSON has no raw tab or newline; backslashes are COPY's own escape.
        payload = json.dumps(chunk, ensure_ascii=False)
        payload = payload.replace("\\", "\\\\")
        line = f"{loading.home}/{partition}{head}{payload}}}\t\\N\t\\N\n"
        lines.append(line.encode())
        if len(lines) == _COPY_CHUNKS:
            yield b"".join(lines)
            lines.clear()
    yield b"".join(lines)


def _cut(
    keys_of: Mapping[int, list[str]], chunk: int
) -> Iterator[tuple[int, list[str]]]:
    for partition, keys in keys_of.items():
        for start in range(0, len(keys), chunk):
            yield partition, keys[start : start + chunk]


def _read_keys(
    connection: psycopg.Connection[Any],
    queries: Queries,
    source: Source,
    lower: str | None,
    upper: str | None,
) -> list[str]:
    # COPY in and COPY out cannot share a connection, so the keys are read into memory
    # first. A range is small enough for that.
    query = source.keys_between(queries, lower, upper)
    return [key for (key,) in connection.execute(query).fetchall()]


def _check_keys(keys: Sequence[str]) -> None:
    """Refuse keys that the outbox cannot store: no retry could write their chunk."""
    if "" in keys:
        raise ReexportError(
            "a key is empty: a record's key has at least one byte. Give the row a key, "
            "or declare the entity with another one"
        )
    for key in keys:
        if len(key) > KEY_LIMIT // _LONGEST_CHARACTER and len(key.encode()) > KEY_LIMIT:
            raise ReexportError(
                f"a key of {len(key)} characters is too long: a record's key has at "
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
