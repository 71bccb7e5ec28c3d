"""Blocks by COPY into a temporary table and one merge, offsets in the same transaction.

Exactly once, as long as the group does not rebalance.
"""

from __future__ import annotations

from functools import partial

from benchmarks.consume.loops.common import (
    GROUP,
    TOPIC,
    Row,
    assign_stored,
    connect,
    ends_of,
    key_of,
    open_consumer,
    row_of,
    take,
)
from benchmarks.consume.statements import INCOMING, MERGE, REMOVE

BLOCK = 10_000
_OFFSETS = """
insert into kafka_offsets as o select %s, %s, * from unnest(%s::int[], %s::bigint[])
on conflict (consumer_group, topic, partition)
do update set next_offset = excluded.next_offset
"""


def line_of(row: Row) -> str:
    """A row in the text form of COPY; no value here has anything to escape."""
    return "\t".join(map(str, row)) + "\n"


def main() -> None:
    """Read until the process is ended."""
    consumer = open_consumer(auto_commit=False)
    with connect(autocommit=True) as connection:
        connection.execute(INCOMING)
        consumer.subscribe([TOPIC], on_assign=partial(assign_stored, connection))
        while True:
            messages = take(consumer, BLOCK, 0.02)
            if not messages:
                continue
            newest = {key_of(m): m for m in messages}
            ends = ends_of(messages)
            gone = [key for key, m in newest.items() if m.value() is None]
            lines = "".join(line_of(row) for m in newest.values() if (row := row_of(m)))
            offsets = (GROUP, TOPIC, list(ends), list(ends.values()))
            with connection.transaction(), connection.cursor() as cursor:
                with cursor.copy("copy incoming from stdin") as copy:
                    copy.write(lines)
                cursor.execute(MERGE, prepare=True)
                if gone:
                    cursor.execute(REMOVE, (gone,))
                cursor.execute(_OFFSETS, offsets, prepare=True)


if __name__ == "__main__":
    main()
