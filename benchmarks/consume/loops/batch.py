"""The same loop in batches: ``executemany``, a commit, then the offsets to Kafka.

At least once: a crash between the two commits repeats a batch. With ``insert`` as its
argument it inserts a row for each record, as the handlers that it is measured beside.
With ``execute`` each insert is a statement of its own, as in a handler per record.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from benchmarks.consume.loops.common import (
    TOPIC,
    Row,
    connect,
    key_of,
    open_consumer,
    row_of,
    take,
)
from benchmarks.consume.statements import DELETE, INSERT, UPSERT

if TYPE_CHECKING:
    import psycopg
    from confluent_kafka import Message


def main() -> None:
    """Read until the process is ended."""
    apply = {"insert": insert, "execute": execute}.get(sys.argv[-1], upsert)
    consumer = open_consumer(auto_commit=False)
    consumer.subscribe([TOPIC])
    with connect() as connection:
        while True:
            messages = take(consumer, 1_000, 0.02)
            if not messages:
                continue
            with connection.cursor() as cursor:
                apply(cursor, messages)
            connection.commit()
            consumer.commit(asynchronous=False)


def upsert(cursor: psycopg.Cursor[Any], messages: list[Message]) -> None:
    """Write the newest record of each key."""
    newest = {key_of(m): row_of(m) for m in messages}
    cursor.executemany(UPSERT, [row for row in newest.values() if row is not None])
    cursor.executemany(DELETE, [(key,) for key, row in newest.items() if row is None])


def insert(cursor: psycopg.Cursor[Any], messages: list[Message]) -> None:
    """Write a row for each record."""
    cursor.executemany(INSERT, map(_whole_row_of, messages))


def execute(cursor: psycopg.Cursor[Any], messages: list[Message]) -> None:
    """Write a row for each record, and wait for each answer."""
    for message in messages:
        cursor.execute(INSERT, _whole_row_of(message))


def _whole_row_of(message: Message) -> Row:
    nothing = (None,) * 4
    return row_of(message) or (key_of(message), *nothing)


if __name__ == "__main__":
    main()
