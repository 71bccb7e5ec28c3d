"""How fast keys become chunk jobs: by Spark, by SQL, and by bare writers."""

from __future__ import annotations

import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa

from benchmarks.figures import median, ratio
from benchmarks.reexports.stage import FLIGHTS, RATE
from jobs_lib import reexport
from jobs_lib.reexport.chunks import choose_due
from spark_bridge import SparkEngine
from spark_bridge.columns import KeyColumn
from spark_bridge.partitioner import choose_partitions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchmarks.reexports.stage import Stage
    from jobs_lib.reexport import Engine

JDBC = "42.7.4"
"""The release of the driver with which Spark itself writes to PostgreSQL."""
PLACED = 1_000_000


def find_jdbc() -> Path | None:
    """The driver's file, fetched by Maven; None where there is no Maven."""
    folder = Path.home() / ".m2" / "repository" / "org" / "postgresql" / "postgresql"
    jar = folder / JDBC / f"postgresql-{JDBC}.jar"
    if not jar.exists() and (maven := shutil.which("mvn")):
        artifact = f"-Dartifact=org.postgresql:postgresql:{JDBC}"
        subprocess.run([maven, "-q", "dependency:get", artifact], check=False)
    return jar if jar.exists() else None


def timed(act: Callable[[], object]) -> float:
    """Return how many seconds an action takes."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def load_once(stage: Stage, engine: Engine, chunk: int = 100) -> float:
    """Load all keys; return keys a second."""
    begun = stage.begin(chunk)
    ahead = 2 * stage.keys
    took = timed(lambda: reexport.load(stage.database, begun, engine, ahead))
    with stage.database.connect("benchmark") as connection:
        row = connection.execute(
            "select sum(jsonb_array_length(payload->'keys')) from jobs_lib.jobs"
        ).fetchone()
    assert row is not None
    assert row[0] == stage.keys, row
    return stage.keys / took


def measure_load(stage: Stage, rounds: int) -> dict[str, float | None]:
    """Load by Spark and by SQL, by turns; the first run of Spark stands apart."""
    first = load_once(stage, SparkEngine())
    spark, plain = [], []
    for _ in range(rounds):
        plain.append(load_once(stage, reexport.SqlEngine()))
        spark.append(load_once(stage, SparkEngine()))
    return {
        "load_first_keys_s": first,
        "load_keys_s": median(spark),
        "load_sql_engine_keys_s": median(plain),
        "load_vs_sql_engine": ratio(median(spark), median(plain)),
    }


def measure_bare(
    stage: Stage, spark: Any, rounds: int, *, jdbc: bool
) -> dict[str, float | None]:
    """Load one job for each key, beside COPY and Spark's own writer."""
    ours, copied, written = [], [], []
    files = make_files(stage)
    for _ in range(rounds):
        ours.append(load_once(stage, SparkEngine(), chunk=1))
        stage.clear()
        copied.append(stage.keys / timed(lambda: copy_files(stage, files)))
        if jdbc:
            stage.clear()
            took = timed(lambda: write_by_jdbc(stage, spark))
            written.append(stage.keys / took)
    return {
        "load_jobs_s": median(ours),
        "load_jobs_vs_copy_2conn": ratio(median(ours), median(copied)),
        "load_jobs_vs_jdbc": ratio(median(ours), median(written)),
    }


def make_files(stage: Stage) -> list[list[bytes]]:
    """The lines that a load writes, for two connections: most jobs are not due yet."""
    begun = stage.begin(1)
    source = begun.loading.source
    assert source is not None
    now = datetime.now(UTC)
    with stage.database.connect("benchmark") as connection:
        queries = stage.database.queries
        ranges = reexport.plan_ranges(connection, queries, FLIGHTS).ranges
        lines, before = [], 0
        for one in ranges:
            keys = KeyColumn.read(connection, queries, source, one.lower, one.upper)
            due = choose_due(before, RATE, 1, now)
            lines.append(b"".join(map(bytes, keys.encode(begun.loading, due))))
            before += len(keys)
    return [lines[0::2], lines[1::2]]


def copy_files(stage: Stage, files: list[list[bytes]]) -> None:
    """Write finished lines by a connection for each file."""

    def copy_one(blocks: Iterable[bytes]) -> None:
        with stage.database.connect("benchmark") as connection:
            query = stage.database.queries["copy_jobs"]
            with connection.cursor() as cursor, cursor.copy(query) as copy:
                for block in blocks:
                    copy.write(block)

    with ThreadPoolExecutor(len(files)) as pool:
        for future in [pool.submit(copy_one, one) for one in files]:
            future.result()


def write_by_jdbc(stage: Stage, spark: Any) -> None:
    """Read the keys and write a job for each by Spark's JDBC, over two connections.

    The origins are by Spark's own hash: it has not Kafka's.
    """
    parts = psycopg.conninfo.conninfo_to_dict(stage.database.url)
    url = f"jdbc:postgresql://{parts['host']}:{parts['port']}/{parts['dbname']}"
    with stage.database.connect("benchmark") as connection:
        row = connection.execute(
            "select percentile_disc(0.5) within group (order by id) from flights"
        ).fetchone()
    assert row is not None
    halves = [f"id < '{row[0]}'", f"id >= '{row[0]}'"]
    properties = {
        "driver": "org.postgresql.Driver",
        "user": parts["user"],
        "password": parts.get("password") or "",
        "reWriteBatchedInserts": "true",
        # The payload is a text to Spark, and jsonb to the table.
        "stringtype": "unspecified",
        "batchsize": "1000",
        # Otherwise the driver reads all rows of a query into memory at once.
        "fetchsize": "10000",
    }
    keys = spark.read.jdbc(url, "flights", predicates=halves, properties=properties)
    jobs = keys.selectExpr(
        "concat('local/', pmod(hash(id), 16)) as origin",
        "'jobs_lib.reexport' as type",
        # Like most of ours, but all for the same time, which costs the index less.
        "'scheduled' as state",
        "current_timestamp() + interval 1 hour as run_at",
        'concat(\'{"reexport": 1, "keys": ["\', id, \'"]}\') as payload',
    )
    jobs.write.jdbc(url, "jobs_lib.jobs", "append", properties)


def measure_places(stage: Stage, rounds: int) -> dict[str, float | None]:
    """Choose the partitions of keys of 37 bytes in columns."""
    keys = pa.array([f"EV{n}-{n:032x}" for n in range(PLACED)], pa.large_string())
    took = [timed(lambda: choose_partitions(keys, 100)) for _ in range(rounds)]
    return {"place_keys_s": ratio(PLACED, median(took))}


def measure_plan(stage: Stage, keys: int) -> dict[str, float | None]:
    """Plan the ranges of a large table."""
    stage.fill(keys, "many")
    many = type(FLIGHTS)("many", FLIGHTS.topic, "many", "id", FLIGHTS.load)
    with stage.database.connect("benchmark") as connection:
        queries = stage.database.queries
        took = timed(lambda: reexport.plan_ranges(connection, queries, many))
        connection.execute("drop table many")
    return {"plan_10m_keys_s": took, "planned_keys": keys}
