"""The rows of a re-export, as its chunk jobs leave them in the outbox."""

from __future__ import annotations

from typing import Any

SHARDS = 16


def write_reexport(
    admin: Any,
    topic: str,
    entity: str,
    rows: int,
    *,
    rate: int,
    first: int = 0,
    shards: int = 1,
    state: str = "running",
    keys: str = "batch",
) -> int:
    """Begin a re-export whose rows wait in so many shards; return its id.

    The shards are those from ``first`` on. The keys are ``batch-1`` and so on.
    """
    (number,) = admin.execute(
        "insert into jobs_lib.reexports (entity, topic, state, rate, total)"
        " values (%s, %s, %s, %s, %s) returning id",
        (entity, topic, state, rate, rows),
    ).fetchone()
    add_rows(admin, number, topic, entity, rows, first=first, shards=shards, keys=keys)
    return int(number)


def add_rows(
    connection: Any,
    reexport: int,
    topic: str,
    entity: str,
    rows: int,
    *,
    first: int = 0,
    shards: int = 1,
    keys: str = "batch",
) -> None:
    """Write rows of a re-export that runs, in so many shards from ``first`` on."""
    connection.execute(
        "insert into jobs_lib.outbox"
        " (shard, class, topic, key, entity, cause, reexport_id)"
        " select (%s + n %% %s) %% %s, 1, %s, %s || n, %s, 'reexport', %s"
        " from generate_series(1, %s) n",
        (first, shards, SHARDS, topic, f"{keys}-", entity, reexport, rows),
    )
