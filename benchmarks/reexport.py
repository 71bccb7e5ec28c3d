"""How fast keys become chunk jobs: `python -m benchmarks.reexport [keys]`.

Both engines load a table of 336,776 keys, or of as many as you ask for, into a durable
PostgreSQL of its own. Spark is measured without its start, which is printed separately.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING

from jobs_lib import App, reexport
from jobs_lib.devstack import PostgresServer
from jobs_lib.outbox.topic import Entity
from jobs_lib.postgres.database import Database
from jobs_lib.postgres.migrate import migrate
from spark_bridge import SparkEngine, open_session

if TYPE_CHECKING:
    from jobs_lib.reexport import Engine

KEYS = 336_776
RUNS = 5
STATES = App("benchmark").topic("flight-state")
FLIGHTS = Entity("flights", STATES, "flights", "id", lambda _conn, _keys: {})


def main(keys: int) -> None:
    """Measure and print."""
    with PostgresServer(durable=True) as server:
        migrate(server.url)
        database = Database(server.url)
        with database.connect("benchmark") as connection:
            connection.execute("create table flights (id text primary key)")
            connection.execute(
                "insert into flights select 'EV' || n || '-' || md5(n::text)"
                " from generate_series(1, %s) n",
                [keys],
            )
            connection.execute("vacuum analyze flights")
            started = time.perf_counter()
            plan = reexport.plan_ranges(connection, database.queries, FLIGHTS)
            took = time.perf_counter() - started
        print(f"plan: {plan.total:,} keys in {len(plan.ranges)} ranges, {took:.2f} s")
        measure("sql", database, reexport.SqlEngine(), keys)
        started = time.perf_counter()
        with open_session("local[2,4]"):
            print(f"spark: session in {time.perf_counter() - started:.1f} s")
            measure("spark", database, SparkEngine(), keys)


def measure(name: str, database: Database, engine: Engine, keys: int) -> None:
    """Load the table several times, and print keys/s."""
    rates = []
    for _ in range(RUNS):
        begun = reexport.begin(database, FLIGHTS, rate=6_000)
        started = time.perf_counter()
        progress = reexport.load(database, begun, engine)
        rates.append(keys / (time.perf_counter() - started))
        assert progress.loaded == keys, progress
        reexport.cancel(database, FLIGHTS.name)
    shown = ", ".join(f"{rate:,.0f}" for rate in rates)
    print(f"{name}: median {statistics.median(rates):,.0f} keys/s (runs: {shown})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else KEYS)
