"""Jobs, owners and claims, inserted by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

if TYPE_CHECKING:
    import psycopg


def add_job(connection: psycopg.Connection[Any], **columns: Any) -> int:
    """Insert a job, by default of type `work` in `local/3`; return its id."""
    values: dict[str, Any] = {
        "origin": "local/3",
        "type": "work",
        "payload": "{}",
        **columns,
    }
    names = ", ".join(f'"{name}"' for name in values)
    row = connection.execute(
        f"insert into jobs_lib.jobs ({names})"
        f" values ({', '.join(['%s'] * len(values))}) returning id",
        list(values.values()),
    ).fetchone()
    assert row is not None
    return row[0]


def add_discarded(connection: psycopg.Connection[Any], **columns: Any) -> int:
    """Move a new job to the discarded ones, as a failure does; return its id."""
    error = columns.pop("error", "boom")
    job = add_job(connection, **columns)
    connection.execute(
        "with gone as (delete from jobs_lib.jobs where id = %s returning *)"
        ' insert into jobs_lib.discarded (id, origin, type, "group", attempt, priority,'
        " payload, headers, unique_key, enqueued_at, errors)"
        ' select id, origin, type, "group", 3, priority, payload, headers, unique_key,'
        " enqueued_at, jsonb_build_array(jsonb_build_object('attempt', 3, 'at', now(),"
        " 'error', %s::text)) from gone",
        (job, error),
    )
    return job


def add_owner(
    connection: psycopg.Connection[Any],
    *,
    origin: str = "local/3",
    types: list[str] | None = None,
    silent: float = 0.0,
    role: str = "execute",
) -> UUID:
    """Add a process, `pod-x`, that owns an origin at epoch 7; return its id."""
    owner = uuid4()
    connection.execute(
        "insert into jobs_lib.processes"
        " (id, pod, roles, host, pid, version, types, heartbeat_at) values"
        " (%s, 'pod-x', %s, 'h', 1, '0', %s,"
        " clock_timestamp() - make_interval(secs => %s))",
        (owner, [role], types, silent),
    )
    connection.execute(
        "insert into jobs_lib.origins (role, origin, owner, epoch)"
        " values (%s, %s, %s, 7)",
        (role, origin, owner),
    )
    return owner


def add_claim(connection: psycopg.Connection[Any], owner: UUID, *ids: int) -> None:
    """Add a claim of the owner, as one batch."""
    connection.execute(
        "insert into jobs_lib.claims (owner, seq, ids) values (%s, 1, %s)",
        (owner, list(ids)),
    )
