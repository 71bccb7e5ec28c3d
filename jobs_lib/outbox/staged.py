"""States of a DataFrame that are staged in a table until their records leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import psycopg
    from psycopg import sql

    from jobs_lib.outbox.block import Left, OutboxRecord

OF_FRAME = "frame"
"""The source of re-exports whose states are staged."""
MUST_NOTE = -1
"""What a statement returns that deletes nothing: what has left must be noted before."""
_NEWER = 2**63 - 1
"""The version of a record without one: no state of a DataFrame may follow it."""


def fill_in_staged(
    connection: psycopg.Connection[Any],
    queries: Mapping[str, sql.Composed],
    records: Sequence[OutboxRecord],
) -> list[OutboxRecord]:
    """Give records their staged states; return those that must not be sent.

    A state must not be sent if one that is as new, or newer, has left meanwhile. Nor
    must a key without a state: its re-export has ended. It is no tombstone: nothing
    says that the entity is gone.
    """
    rows = connection.execute(
        queries["read_states"],
        {
            "reexports": int_array(cast("int", one.staged) for one in records),
            "keys": text_array([cast("str", one.key) for one in records]),
        },
        prepare=True,
        binary=True,
    ).fetchall()
    superseded = []
    for place, version, value, content_type, left in rows:
        record = records[place - 1]
        if value is None or (left is not None and left >= version):
            superseded.append(record)
            continue
        record.value, record.version = value, version
        if content_type is not None:
            record.more = {"content-type": content_type}
    return superseded


def note_versions(
    connection: psycopg.Connection[Any],
    queries: Mapping[str, sql.Composed],
    versions: Iterable[Left],
) -> None:
    """Note what has left, for the re-exports of DataFrames to the same topics."""
    left = [*versions]
    connection.execute(
        queries["note_versions"],
        {
            "topics": text_array([topic for topic, _, _, _ in left]),
            "keys": text_array([key for _, key, _, _ in left]),
            "versions": int_array(
                _NEWER if version is None else version for _, _, version, _ in left
            ),
            "reexports": int_array(staged for _, _, _, staged in left),
        },
        prepare=True,
    )
