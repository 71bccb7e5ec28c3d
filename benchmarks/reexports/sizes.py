"""What a re-export needs of the database, and how fast it is without a rate."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.reexports.rates import UNLIMITED, staged
from jobs_lib import reexport
from jobs_lib.reexport.plan import KEYS_PER_RANGE

if TYPE_CHECKING:
    import psycopg

    from benchmarks.server import Server
    from jobs_lib.devstack import KafkaBroker

_SIZES = """
select pg_total_relation_size('jobs_lib.jobs'),
    pg_total_relation_size('jobs_lib.reexport_ranges'),
    pg_database_size(current_database())
"""


def measure_sizes(
    server: Server, broker: KafkaBroker, *, quick: bool
) -> dict[str, Any]:
    """Load keys, look at the tables, and send all of them as fast as that goes."""
    keys = 50_000 if quick else 1_000_000
    with staged(server, broker) as stage, server.connect() as connection:
        stage.fill("first", keys)
        before = read_sizes(connection)
        stage.begin("first", UNLIMITED)
        loaded = read_sizes(connection)
        stage.run()
        stage.await_sent("first", keys // 10)
        began, first = time.monotonic(), reexport.status(stage.database, "first").sent
        stage.await_sent("first", keys - keys // 10)
        took = time.monotonic() - began
        sent = reexport.status(stage.database, "first").sent - first
        while not reexport.status(stage.database, "first").ended:
            time.sleep(0.5)
        relay_mb = stage.read_peak_mb()
        connection.execute("vacuum")
        kept = read_sizes(connection)
    return {
        "waiting_bytes_per_key": (loaded[0] - before[0]) / keys,
        "range_bytes": (loaded[1] - before[1]) / (keys / KEYS_PER_RANGE),
        "kept_bytes_per_key": (kept[2] - before[2]) / keys,
        "sent_without_a_rate_s": sent / took,
        "relay_mb": relay_mb,
    }


def read_sizes(connection: psycopg.Connection[Any]) -> tuple[int, int, int]:
    """Read the bytes of the jobs, of the ranges, and of the whole database."""
    row = connection.execute(_SIZES).fetchone()
    assert row is not None
    return row[0], row[1], row[2]
