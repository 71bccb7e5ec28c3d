"""The things that each measure uses: a fresh outbox and topic, a relay, a consumer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import Consumer, IsolationLevel, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewTopic,
    OffsetSpec,
)

from benchmarks.machine import find_children, peak_rss_mb
from benchmarks.ownership.pods import wait_until
from benchmarks.peers.peer import REPOSITORY
from jobs_lib.postgres.migrate import migrate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from benchmarks.server import Server
    from jobs_lib.devstack import KafkaBroker

T = TypeVar("T")
PARTITIONS = 8
KEYS = 10_000
_WARM_UP_ROWS = 200_000
_WARM_UP_RUNS = 3
_LATEST = OffsetSpec.latest()  # type: ignore[no-untyped-call]
_QUIET = 1.0
"""Seconds without a record after which no record is on its way."""
_COMMAND = ["jobs_lib.cli", "relay", "benchmarks.relay.service:app"]
_OWNED = """
select count(*) from jobs_lib.origins where owner is not null group by owner
"""
_FILL = """
insert into jobs_lib.outbox (shard, topic, key, value, version)
select jobs_lib.place_record(%(topic)s, key), %(topic)s, key,
    convert_to('{"key": "' || key || '", "x": "' || repeat('x', 260) || '"}', 'UTF8'),
    n
from (select 'key-' || n %% %(keys)s as key, n from generate_series(1, %(rows)s) n) rows
"""


_HOLD = """
with rows as (
    insert into jobs_lib.held_rows
        (shard, class, id, topic, key, value, cause, created_at)
    select jobs_lib.place_record(%(topic)s, 'held-' || n), 0, -n, %(topic)s,
        'held-' || n, '', 'live', now()
    from generate_series(1, %(rows)s) n
)
insert into jobs_lib.holds (topic, key, error, retry_at)
-- Longer than any pause of a hold, and it would count as due: a clock was set back.
select %(topic)s, 'held-' || n, 'too large', now() + interval '9 minutes'
from generate_series(1, %(rows)s) n
"""


@dataclass
class Stage:
    """A database with an empty outbox, and a topic of its own."""

    server: Server
    broker: KafkaBroker
    admin: AdminClient
    """One client for all questions: a new one may take seconds for its first answer."""
    topic: str = field(default_factory=lambda: f"bench-{uuid.uuid4().hex[:8]}")

    def fill(self, connection: psycopg.Connection[Any], rows: int) -> float:
        """Write rows in one transaction; return the clock's time after its commit."""
        with connection.transaction():
            connection.execute(_FILL, {"topic": self.topic, "keys": KEYS, "rows": rows})
            connection.execute("select pg_notify(jobs_lib.channel('outbox'), '')")
        return time.monotonic()

    def hold(self, connection: psycopg.Connection[Any], rows: int) -> None:
        """Hold this many keys of the topic, with one row each."""
        connection.execute(_HOLD, {"topic": self.topic, "rows": rows})

    def count_holds(self) -> int:
        """Count the held keys."""
        with self.server.connect() as connection:
            row = connection.execute("select count(*) from jobs_lib.holds").fetchone()
        assert row is not None
        return int(row[0])

    @contextlib.contextmanager
    def relaying(
        self, *, idempotent: bool = False, processes: int = 1
    ) -> Iterator[Relaying]:
        """One relay process, or several; by then they own all shards."""
        command = [*_COMMAND, "--processes", str(processes)]
        with self._running(command, BENCH_IDEMPOTENT="1" if idempotent else "") as pid:
            shares = [16 // processes] * processes
            wait_until(lambda: self._owned() == shares, 60, "each owns its share")
            yield Relaying(pid)

    def _owned(self) -> list[int]:
        """How many shards each relay owns."""
        with self.server.connect() as connection:
            rows = connection.execute(_OWNED).fetchall()
        return [count for (count,) in rows]

    @contextlib.contextmanager
    def relaying_barely(self) -> Iterator[Relaying]:
        """The least that a relay does, in a process of its own."""
        with self._running(["benchmarks.relay.bare"]) as pid:
            yield Relaying(pid)

    @contextlib.contextmanager
    def _running(self, module: list[str], **more: str) -> Iterator[int]:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("JOBS_LIB_")},
            "JOBS_LIB_DATABASE_URL": self.server.url,
            "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": self.broker.bootstrap_servers,
            "BENCH_TOPIC": self.topic,
            "PYTHONPATH": str(REPOSITORY),
            **more,
        }
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *module],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            try:
                yield process.pid
            finally:
                process.terminate()
                process.wait(30)

    @contextlib.contextmanager
    def consuming(self) -> Iterator[Consuming]:
        """A consumer that starts at the topic's end."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.broker.bootstrap_servers,
                "group.id": "bench",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 5,
            }
        )
        consumer.assign(self._partitions())
        try:
            yield Consuming(consumer)
        finally:
            consumer.close()

    def await_rest(
        self, records: int, seconds: float, look: Callable[[], T]
    ) -> tuple[float, T]:
        """Wait until no more records come, and this many records have come.

        This asks for the ends of the partitions as a reader of committed records sees
        them, and reads the records only then. A consumer would use the CPU during the
        measurement.

        Returns:
            The clock's time when the last one came, and what ``look`` returned then.

        Raises:
            RuntimeError: more or fewer records can be read, or some came later.
        """
        deadline = time.monotonic() + seconds
        last, came, looked = 0, time.monotonic(), look()
        while last < records or time.monotonic() - came < _QUIET:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{last} of {records} records came")
            if (end := self._find_end()) != last:
                last, came = end, time.monotonic()
                # The call is expensive, and only the last one counts.
                looked = look() if last >= records else looked
            time.sleep(0.01)
        with self.consuming() as consuming:
            consuming.await_records(records, 60)
        if consuming.seen != records or self._find_end() != last:
            raise RuntimeError(f"{consuming.seen} records came instead of {records}")
        return came, looked

    def _find_end(self) -> int:
        """Count readable records and marks of transactions, in all partitions."""
        found = self.admin.list_offsets(
            dict.fromkeys(self._partitions(), _LATEST),
            isolation_level=IsolationLevel.READ_COMMITTED,
        )
        return sum(future.result().offset for future in found.values())

    def _partitions(self) -> list[TopicPartition]:
        return [TopicPartition(self.topic, n, 0) for n in range(PARTITIONS)]


@dataclass
class Relaying:
    """A running relay."""

    pid: int

    @property
    def rss_mb(self) -> float:
        """The most memory that it and its children have used."""
        return sum(peak_rss_mb(pid) for pid in (self.pid, *find_children(self.pid)))


@dataclass
class Consuming:
    """A consumer of the topic, and how many records it has seen."""

    consumer: Consumer
    seen: int = 0

    def await_records(self, records: int, seconds: float) -> float:
        """Read until this many have been seen in all; return the clock's time then."""
        deadline = time.monotonic() + seconds
        while self.seen < records:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.seen} of {records} records came")
            self.seen += len(self.consumer.consume(5_000, 0.005))
        return time.monotonic()

    def await_one(self, seconds: float = 10.0) -> float:
        """Read one more record; return the clock's time then."""
        deadline = time.monotonic() + seconds
        while (record := self.consumer.poll(0.5)) is None or record.error():
            if time.monotonic() > deadline:
                raise TimeoutError("no record came")
        self.seen += 1
        return time.monotonic()


@contextlib.contextmanager
def staged(server: Server, broker: KafkaBroker) -> Iterator[Stage]:
    """A fresh database and topic."""
    server.renew()
    migrate(server.url)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    stage = Stage(server, broker, admin)
    admin.create_topics([NewTopic(stage.topic, PARTITIONS, 1)])[stage.topic].result()
    yield stage


def warm_up(server: Server, broker: KafkaBroker, records: int) -> None:
    """Let a new broker compile its code: that takes longer than to run it.

    A relay sends the records, with a consumer and, as in the measure of rows, without
    one: for other clients the broker compiles other code.
    """
    with (
        staged(server, broker) as stage,
        stage.relaying(),
        stage.consuming() as consuming,
        server.connect() as connection,
    ):
        for seen in range(0, records, _WARM_UP_ROWS):
            stage.fill(connection, _WARM_UP_ROWS)
            consuming.await_records(seen + _WARM_UP_ROWS, 60)
    for _ in range(_WARM_UP_RUNS):
        with (
            staged(server, broker) as stage,
            stage.relaying(),
            server.connect() as connection,
        ):
            stage.fill(connection, _WARM_UP_ROWS)
            stage.await_rest(_WARM_UP_ROWS, 60, time.monotonic)
