"""Insert jobs in the caller's transaction."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from psycopg.rows import tuple_row

from jobs_lib.db import Queries, driver_connection
from jobs_lib.errors import EnqueueError, PayloadError, TopicError
from jobs_lib.jobs.context import current_origin
from jobs_lib.partitioner import choose_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import datetime

    import psycopg

    from jobs_lib.db import Caller

GROUP_LIMIT = 1_000
"""Bytes that a group may have: it stands in an index."""
_LOCKED_ONE_BY_ONE = 64
_COPY_ROWS = 2_000
_cached_origin = lru_cache(maxsize=65_536)(choose_origin)


@dataclass(frozen=True, slots=True)
class Entry:
    """One job to be inserted, checked already."""

    type: str
    payload: bytes
    group: str | None
    run_at: datetime | None
    origin: str | None
    """Given by the caller; None to derive it."""


class Enqueuer:
    """Writes jobs into one schema."""

    def __init__(self, queries: Callable[[], Queries]) -> None:
        self._load = queries
        self._lock = threading.Lock()
        self._topics: dict[str, int] = {}
        self._home: str | None = None

    def enqueue(self, caller: Caller, entry: Entry, *, ordered: bool) -> int:
        """Insert one job; returns its id.

        Raises:
            EnqueueError: refused before any SQL; the transaction is intact.
        """
        connection = driver_connection(caller)
        queries = self._load()
        origin = self._choose_origin(connection, queries, entry)
        query = "enqueue" if ordered and entry.group else "enqueue_unordered"
        with connection.cursor(row_factory=tuple_row) as cursor:
            cursor.execute(
                queries[query],
                {
                    "origin": origin,
                    "type": entry.type,
                    "group": entry.group,
                    "payload": entry.payload.decode(),
                    "run_at": entry.run_at,
                    "headers": None,
                },
                prepare=True,
            )
            return int(cast("tuple[int]", cursor.fetchone())[0])

    def enqueue_many(
        self, caller: Caller, entries: Iterable[Entry], *, ordered: bool
    ) -> int:
        """Insert many jobs by COPY, in the order given; returns how many.

        All are checked before the first is sent.

        Raises:
            EnqueueError: one of them is refused; none is inserted.
        """
        connection = driver_connection(caller)
        queries = self._load()
        rows = [
            (self._choose_origin(connection, queries, entry), entry)
            for entry in entries
        ]
        with connection.cursor(row_factory=tuple_row) as cursor:
            if ordered:
                _lock(cursor, queries, rows)
            with cursor.copy(queries["copy_jobs"]) as copy:
                for block in _copy_blocks(rows):
                    copy.write(block)
        return len(rows)

    def _choose_origin(
        self, connection: psycopg.Connection[Any], queries: Queries, entry: Entry
    ) -> str:
        if self._home is None:
            self._read_topics(connection, queries)
        home = cast("str", self._home)
        if entry.origin is not None:
            topic, slash, partition = entry.origin.rpartition("/")
            if not slash or topic not in self._topics or not partition.isdigit():
                known = ", ".join(sorted(self._topics))
                raise TopicError(
                    f"no topic is declared for the origin {entry.origin!r}: give "
                    f"topic/partition with one of the topics {known}"
                )
            return entry.origin
        if entry.group is not None:
            return _cached_origin(entry.group, home, self._topics[home])
        handled = current_origin()
        if handled is not None:
            return handled
        return f"{home}/{random.randrange(self._topics[home])}"

    def _read_topics(
        self, connection: psycopg.Connection[Any], queries: Queries
    ) -> None:
        with self._lock, connection.cursor(row_factory=tuple_row) as cursor:
            rows = cursor.execute(queries["read_topics"]).fetchall()
            self._topics = {topic: partitions for topic, partitions, _ in rows}
            homes = [topic for topic, _, home in rows if home]
            if not homes:
                raise TopicError(
                    "no home topic is declared, so a job's origin cannot be computed: "
                    "run `jobs-lib topics declare TOPIC --partitions N --home`"
                )
            self._home = homes[0]


def check_group(type_name: str, group: object) -> str | None:
    """The group if it can be stored.

    Raises:
        PayloadError: it is not a short, storable string.
    """
    if group is None:
        return None
    if not isinstance(group, str):
        raise PayloadError(
            f"the group of {type_name!r} must be a str or None, not {group!r}"
        )
    try:
        size = len(group.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= GROUP_LIMIT or "\0" in group:
        raise PayloadError(
            f"the group of {type_name!r} must have 1 to {GROUP_LIMIT} bytes of UTF-8 "
            f"without NUL, not {group[:40]!r} ({len(group)} characters); None means "
            "no group"
        )
    return group


def check_run_at(type_name: str, run_at: datetime | None) -> datetime | None:
    """The time if it can be stored.

    Raises:
        EnqueueError: it has no time zone.
    """
    if run_at is not None and run_at.utcoffset() is None:
        raise EnqueueError(
            f"run_at of {type_name!r} is {run_at.isoformat()} without a time zone: "
            "give one, as in datetime.now(timezone.utc)"
        )
    return run_at


def _lock(
    cursor: psycopg.Cursor[Any], queries: Queries, rows: list[tuple[str, Entry]]
) -> None:
    groups = {entry.group: origin for origin, entry in rows if entry.group}
    if not groups:
        return
    origins = sorted(set(groups.values()))
    if len(groups) <= _LOCKED_ONE_BY_ONE:
        cursor.execute(
            queries["lock_groups"], {"origins": origins, "groups": list(groups)}
        )
    else:
        cursor.execute(queries["lock_origins_of_groups"], {"origins": origins})


def _copy_blocks(rows: list[tuple[str, Entry]]) -> Iterator[bytes]:
    """COPY's text format, in blocks: one call per block, not per row."""
    remaining = iter(rows)
    while chunk := list(islice(remaining, _COPY_ROWS)):
        yield b"".join(_copy_line(origin, entry) for origin, entry in chunk)


def _copy_line(origin: str, entry: Entry) -> bytes:
    # JSON holds no raw tab or newline; backslashes are COPY's own escape.
    payload = entry.payload.replace(b"\\", b"\\\\")
    head = f"{origin}\t{entry.type}\t{_copy_text(entry.group)}\t".encode()
    if entry.run_at is None:
        return b"%savailable\t%s\t\\N\t\\N\n" % (head, payload)
    return b"%sscheduled\t%s\t%s\t\\N\n" % (
        head,
        payload,
        entry.run_at.isoformat().encode(),
    )


def _copy_text(value: str | None) -> str:
    if value is None:
        return "\\N"
    if value.isalnum():
        return value
    return (
        value.replace("\\", "\\\\")
        .replace("\t", "\\t")
        .replace("\n", "\\n")
        .replace("\r", "\\r")
    )
