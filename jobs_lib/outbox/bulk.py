"""Many records of one topic, written at once in the caller's transaction."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobs_lib.callers import CopyIn, Fetch
from jobs_lib.partitioner import choose_shard
from jobs_lib.postgres.values import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.callers import Statements, Steps

_LOCKED_ONE_BY_ONE = 64
_AT_ONCE = 1_000


@dataclass(slots=True)
class Row:
    """One record, checked already."""

    key: str | None
    value: bytes = field(repr=False)
    version: int | None


def write_many(
    statements: Statements,
    topic: str,
    shards: int,
    rows: list[Row],
    headers: str | None,
    *,
    notify: bool,
) -> Steps[int]:
    """Insert rows in the order given; returns how many.

    Up to 64 keys are locked one by one. For more keys their shards are locked: a lock
    for each of 100,000 keys would exhaust the server's lock table.
    """
    keys = dict.fromkeys(row.key for row in rows)
    shard_of = {key: choose_shard(topic, key, shards) for key in keys}
    places = [(str(shard), key) for key, shard in shard_of.items() if key is not None]
    if len(places) > _LOCKED_ONE_BY_ONE:
        locked = json.dumps(sorted({shard for shard, _ in places}))
        yield Fetch(statements["lock_shards"], {"shards": locked})
    elif places:
        yield Fetch(
            statements["lock_keys"], {"topic": topic, "places": json.dumps(places)}
        )
    yield CopyIn(
        statements.load_queries()["copy_outbox"],
        _lines(topic, shard_of, rows, headers),
        lambda: _inserts(statements, topic, shard_of, rows, headers),
    )
    if notify and rows:
        yield Fetch(statements["hint_outbox"], {})
    return len(rows)


def _lines(
    topic: str, shard_of: dict[str | None, int], rows: list[Row], headers: str | None
) -> Iterator[bytes]:
    """Yield blocks of lines in the text format of COPY."""
    after = f"\t{escape(headers)}\n".encode()
    for some in _batches(rows):
        yield b"".join(_line(topic, shard_of[row.key], row) + after for row in some)


def _line(topic: str, shard: int, row: Row) -> bytes:
    version = "\\N" if row.version is None else str(row.version)
    value = "\\\\x" + row.value.hex()
    return f"{shard}\t{topic}\t{escape(row.key)}\t{value}\t{version}".encode()


def _inserts(
    statements: Statements,
    topic: str,
    shard_of: dict[str | None, int],
    rows: list[Row],
    headers: str | None,
) -> Iterator[Fetch]:
    """Yield inserts of the same rows, for drivers without COPY."""
    for some in _batches(rows):
        text = json.dumps(
            [[shard_of[r.key], r.key, r.value.hex(), r.version] for r in some]
        )
        yield Fetch(
            statements["insert_outbox"],
            {"topic": topic, "rows": text, "headers": headers},
        )


def _batches(rows: list[Row]) -> Iterator[list[Row]]:
    return (rows[n : n + _AT_ONCE] for n in range(0, len(rows), _AT_ONCE))
