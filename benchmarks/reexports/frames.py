"""How fast the states of a Parquet file are staged."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import median
from jobs_lib import App
from jobs_lib.kafka.client import create_topic, make_admin
from jobs_lib.outbox.topic import Entity
from jobs_lib.postgres.database import Database
from jobs_lib.postgres.migrate import migrate
from jobs_lib.reexport import cancel
from jobs_lib.settings import load_settings
from spark_bridge import FrameSource, open_session, start

if TYPE_CHECKING:
    from benchmarks.server import Server
    from jobs_lib.devstack import KafkaBroker

STATES = 1_000_000
RUNS = 3
TOPIC = "flight-history"
PARTITIONS = 4


@dataclass
class Flight:
    """A state of about 100 bytes."""

    id: int
    carrier: str
    origin: str
    destination: str
    delay: int
    version: int


def measure_frames(
    server: Server, broker: KafkaBroker, *, quick: bool
) -> dict[str, Any]:
    """Examine and stage a file, again and again, with Spark already there."""
    states = 20_000 if quick else STATES
    settings = load_settings(
        database_url=server.url, kafka_bootstrap_servers=broker.bootstrap_servers
    )
    server.renew()
    migrate(server.url)
    compacted = {"cleanup.policy": "compact"}
    create_topic(make_admin(settings), TOPIC, PARTITIONS, compacted)
    topic = App("benchmark", settings=settings).topic(
        TOPIC, value=Flight, compacted=True, partitions=PARTITIONS
    )
    flights = Entity("flights", topic, "flights", "id", lambda _conn, _keys: {})
    rates: list[float | None] = []
    with tempfile.TemporaryDirectory() as folder, open_session("local[2,4]"):
        path = Path(folder, "flights.parquet")
        write_file(path, states)
        for _ in range(RUNS + 1):
            began = time.perf_counter()
            source = FrameSource.parquet(str(path))
            database = Database(server.url)
            done = start(database, flights, rate=6_000, frame=source)
            rates.append(states / (time.perf_counter() - began))
            assert done.total == states, done
            cancel(database, "flights")
    return {
        "parquet_states_s": median(rates[1:]),
        "parquet_first_states_s": rates[0],
    }


def write_file(path: Path, states: int) -> None:
    """Write the states, each of another key."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = {
        "id": range(states),
        "carrier": ["EV"] * states,
        "origin": ["EWR"] * states,
        "destination": ["IAH"] * states,
        "delay": range(states),
        "version": [1] * states,
    }
    parquet.write_table(pa.table({name: [*of] for name, of in rows.items()}), path)
