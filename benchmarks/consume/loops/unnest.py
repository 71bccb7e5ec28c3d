"""The best loop of an afternoon: blocks, one statement for each, offsets in it.

The newest record of a key only, and a version guard. Exactly once, as long as the group
does not rebalance: nothing fences a stale process.
"""

from __future__ import annotations

from functools import partial

from benchmarks.consume.loops.common import (
    GROUP,
    TOPIC,
    assign_stored,
    connect,
    ends_of,
    key_of,
    open_consumer,
    row_of,
    take,
)

BLOCK = 5_000
_UPSERT = """
with _ as (
    insert into kafka_offsets as o
    select %s, %s, * from unnest(%s::int[], %s::bigint[])
    on conflict (consumer_group, topic, partition)
    do update set next_offset = excluded.next_offset
), gone as (delete from aircraft_rm where tail = any (%s::text[]))
insert into aircraft_rm as a (tail, airport, flights, minutes_late, version)
select * from unnest(%s::text[], %s::text[], %s::int[], %s::int[], %s::bigint[])
on conflict (tail) do update set airport = excluded.airport, flights = excluded.flights,
    minutes_late = excluded.minutes_late, version = excluded.version
where a.version < excluded.version
"""


def main() -> None:
    """Read until the process is ended."""
    consumer = open_consumer(auto_commit=False)
    with connect(autocommit=True) as connection:
        consumer.subscribe([TOPIC], on_assign=partial(assign_stored, connection))
        while True:
            messages = take(consumer, BLOCK, 0.02)
            if not messages:
                continue
            newest = {key_of(m): m for m in messages}
            ends = ends_of(messages)
            rows = [row for m in newest.values() if (row := row_of(m))]
            gone = [key for key, m in newest.items() if m.value() is None]
            columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * 5
            offsets = (GROUP, TOPIC, list(ends), list(ends.values()))
            connection.execute(_UPSERT, (*offsets, gone, *columns), prepare=True)


if __name__ == "__main__":
    main()
