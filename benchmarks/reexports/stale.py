"""How fast a topic is compared with its table.

A topic of a million records in four partitions is compared with a table that lacks one
key of a hundred. Spark is measured without its start, and its first run apart.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

from benchmarks.figures import median
from jobs_lib import App
from jobs_lib.kafka.client import create_topic, make_admin
from jobs_lib.outbox.topic import Entity
from jobs_lib.postgres.database import Database
from jobs_lib.postgres.migrate import migrate
from jobs_lib.reexport import SqlFinder
from jobs_lib.settings import load_settings
from spark_bridge import open_session
from spark_bridge.repairs import SparkFinder

if TYPE_CHECKING:
    from benchmarks.server import Server
    from jobs_lib.devstack import KafkaBroker
    from jobs_lib.reexport import Finder
    from jobs_lib.settings import Settings

RECORDS = 1_000_000
RUNS = 3
TOPIC = "flight-state"
PARTITIONS = 4


def measure_stale(
    server: Server, broker: KafkaBroker, *, quick: bool
) -> dict[str, Any]:
    """Compare by Spark and by SQL, with Spark already there."""
    records = 20_000 if quick else RECORDS
    server.renew()
    migrate(server.url)
    settings = load_settings(
        database_url=server.url, kafka_bootstrap_servers=broker.bootstrap_servers
    )
    database = Database(server.url)
    topic = App("benchmark", settings=settings).topic(TOPIC, compacted=True)
    flights = Entity("flights", topic, "flights", "id", lambda _conn, _keys: {})
    fill(database, settings, records)
    sql = measure(SqlFinder(), database, settings, flights, records)
    with open_session("local[2,4]"):
        first = measure(SparkFinder(), database, settings, flights, records, runs=1)
        spark = measure(SparkFinder(), database, settings, flights, records)
    return {
        "stale_compare_records_s": median(spark),
        "stale_compare_first_records_s": first[0],
        "stale_compare_sql_records_s": median(sql),
    }


def fill(database: Database, settings: Settings, records: int) -> None:
    """Make the topic, and the table without each hundredth key."""
    with database.connect("benchmark") as connection:
        connection.execute("create table flights (id text primary key)")
        connection.execute(
            "insert into flights select 'EV' || n from generate_series(1, %s::int) n"
            " where n %% 100 > 0",
            [records],
        )
        connection.execute("vacuum analyze flights")
    create_topic(make_admin(settings), TOPIC, PARTITIONS, {"cleanup.policy": "compact"})
    producer = Producer(
        {
            "bootstrap.servers": settings.kafka_bootstrap_servers,
            "linger.ms": 50,
            "queue.buffering.max.messages": 200_000,
        }
    )
    value = json.dumps({"carrier": "EV", "origin": "EWR", "delay": 12}).encode()
    for number in range(1, records + 1):
        while True:
            try:
                producer.produce(
                    TOPIC, value, f"EV{number}", headers=[("ce_version", "1")]
                )
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush()


def measure(
    finder: Finder,
    database: Database,
    settings: Settings,
    entity: Entity,
    records: int,
    runs: int = RUNS,
) -> list[float | None]:
    """Compare several times; returns the records of the topic per second of each."""
    rates: list[float | None] = []
    for _ in range(runs):
        started = time.perf_counter()
        with finder.find(database, settings, entity) as stale:
            assert stale.count == records // 100, stale.count
        rates.append(records / (time.perf_counter() - started))
    return rates
