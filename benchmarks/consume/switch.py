"""How long readers wait while another version of a read model takes its place."""

from __future__ import annotations

import threading
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.consume import peers
from benchmarks.consume.resync import RECORDS, fill_keys
from benchmarks.consume.stage import ConsumerError
from benchmarks.consume.tables import READ_MODEL
from benchmarks.figures import percentile
from benchmarks.ownership.pods import wait_until
from jobs_lib import App
from jobs_lib.operating.switching import switch
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.consume.stage import Stage
    from benchmarks.consume.tables import Connection
    from benchmarks.consume.topics import Topic
    from benchmarks.worker import Row

SECOND = "aircraft_v2_rm"
_READERS = 4
_SECONDS = 400.0
_AROUND = 1.0
"""Seconds for which readers read before and after the switch."""
_LOOK = (
    "select flights, minutes_late from aircraft_rm"
    " where tail = (select 'N' || lpad((random() * {keys})::int::text, 6, '0'))"
)


def measure_switch(bench: Bench, stage: Stage) -> Figures:
    """Switch a read model of 1,000,000 rows while others read it."""
    topic = fill_keys(stage, bench.size(RECORDS))
    found = bench.alternate({"switch": partial(switch_beside, bench, stage, topic)})
    ours = found["switch"]
    return {
        "switch_1m_ms": ours.median("longest_ms"),
        "switch_locked_ms": ours.median("locked_ms"),
        "switch_reader_p50_ms": ours.median("p50_ms"),
    }


def switch_beside(bench: Bench, stage: Stage, topic: Topic) -> Row:
    """Fill both versions, and switch while others read one row after the other.

    Raises:
        ConsumerError: a reader has failed, or the new version lacks rows.
    """
    keys = topic.records
    group = f"bench-{uuid.uuid4().hex[:8]}"
    with (
        stage.prepared(READ_MODEL) as connection,
        stage.consuming(peers.TWO_VERSIONS, topic, group=group) as service,
    ):

        def are_filled() -> bool:
            service.check()
            tables = (READ_MODEL.name, SECOND)
            return all(_count(connection, table) == keys for table in tables)

        wait_until(are_filled, _SECONDS, "both versions are filled", pause=0.5)
        connection.execute("vacuum analyze")
        connection.execute("checkpoint")
        app = _make_app(bench.server.url, stage, topic.name, group)
        with _Readers(bench, keys) as readers:
            time.sleep(_AROUND)
            done = switch(app, READ_MODEL.name, 2)
            time.sleep(_AROUND)
        if _count(connection, READ_MODEL.name) != keys:
            raise ConsumerError(f"{READ_MODEL.name} lacks rows after the switch")
    return {
        "longest_ms": max(readers.waits),
        "p50_ms": percentile(readers.waits, 0.5),
        "locked_ms": 1_000 * done.seconds,
        "reads": len(readers.waits),
    }


class _Readers:
    """Read random rows by the name that readers know, until the end of the block."""

    def __init__(self, bench: Bench, keys: int) -> None:
        self.waits: list[float] = []
        """The milliseconds of each read."""
        self._bench = bench
        self._query = _LOOK.format(keys=keys - 1).encode()
        self._stop = threading.Event()
        self._failures: list[Exception] = []
        self._threads = [threading.Thread(target=self._read) for _ in range(_READERS)]

    def __enter__(self) -> _Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise ConsumerError(f"a reader has failed: {self._failures[0]}")

    def _read(self) -> None:
        try:
            with self._bench.server.connect() as connection:
                while not self._stop.is_set():
                    began = time.perf_counter()
                    row = connection.execute(self._query).fetchone()
                    self.waits.append(1_000 * (time.perf_counter() - began))
                    if row is None:
                        raise ConsumerError("it sees no row")
                    time.sleep(0.001)
        except Exception as error:
            self._failures.append(error)


def _count(connection: Connection, table: str) -> int:
    row = connection.execute(f"select count(*) from {table}".encode()).fetchone()
    assert row is not None
    return int(row[0])


def _make_app(url: str, stage: Stage, topic: str, group: str) -> App:
    broker = stage.broker.bootstrap_servers
    app = App(
        "bench",
        settings=load_settings(database_url=url, kafka_bootstrap_servers=broker),
    )
    for version in (1, 2):

        @app.read_model(
            topic, table=READ_MODEL.name, key="tail", group=group, version=version
        )
        def aircraft_rm(record: Any) -> dict[str, Any]:
            return {}

    return app
