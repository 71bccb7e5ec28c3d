"""The least that any relay in Python does: read, produce, commit, delete.

It has the client libraries, the headers, the blocks and the threads of the relay. It
has no fences, holds, merging, sizes or events. It reads an empty shard again, which
makes the server pass over deleted rows. So it is a little slower than the fastest
possible relay.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from benchmarks.relay.service import app
from jobs_lib.kafka.client import make_producer
from jobs_lib.outbox.relay import SENDERS
from jobs_lib.postgres.tid_array import TidArray

if TYPE_CHECKING:
    import psycopg
    from confluent_kafka import Producer

SHARDS = 16
_PAUSE = 0.02
"""The seconds after which a thread that has found nothing looks again."""
_READ = """
select ctid, topic, key, value, id::text, version::text,
    to_json(created_at at time zone 'UTC')::text
from jobs_lib.outbox where shard = %s and class = 0
-- `id` alone would be the result's, which is text: all of the shard would be sorted.
order by outbox.id limit 5000
"""
_DELETE = "delete from jobs_lib.outbox where ctid = any (%s)"
_HEAD: list[tuple[str, str | bytes | None]] = [
    ("ce_specversion", b"1.0"),
    ("ce_type", os.environ.get("BENCH_TOPIC", "bench").encode()),
    ("ce_source", b"bench"),
    ("ce_cause", b"live"),
]


def relay(first: int) -> None:
    """Relay a share of the shards, for ever."""
    producers: dict[int, Producer] = {}
    for shard in range(first, SHARDS, SENDERS):
        producers[shard] = make_producer(app.settings, f"bare-{shard}", 10.0)
        producers[shard].init_transactions(30)
    with app.database().connect("bare", impatient=True) as connection:
        while True:
            moved = [relay_block(connection, *one) for one in producers.items()]
            if not any(moved):
                time.sleep(_PAUSE)


def relay_block(
    connection: psycopg.Connection[Any], shard: int, producer: Producer
) -> bool:
    """Relay one block of a shard; return whether it had rows."""
    rows = connection.execute(_READ, (shard,), prepare=True, binary=True).fetchall()
    if not rows:
        return False
    producer.begin_transaction()
    produce = producer.produce
    for _, topic, key, value, row_id, version, at in rows:
        headers = [("ce_id", row_id), *_HEAD, ("ce_time", at), ("ce_version", version)]
        produce(topic, value, key, -1, None, None, 0, headers)
    producer.commit_transaction(30)
    places = TidArray([row[0] for row in rows])
    connection.execute(_DELETE, (places,), prepare=True)
    return True


def main() -> None:
    """Relay until the process is ended."""
    gc.disable()
    for first in range(SENDERS):
        threading.Thread(target=relay, args=(first,), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
