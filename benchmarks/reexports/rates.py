"""The rate of re-exports at the topic, and live records beside them.

The judge is the topic: Kafka's own time of each record, read at the end.

    rate      two re-exports at once, through a pause, a change and an outage:
              the fullest minute, the mean while nothing held them up, the processors
              that the service and PostgreSQL use for both, and the service's memory
    live      the time from a commit to a consumer, without a re-export, beside one, and
              beside one whose rate limits nothing
    start     from the command to the first record that a consumer can read
    restart   records of a re-export whose relay is killed now and then, to its keys
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewTopic,
)

from benchmarks.figures import count_fullest, median, percentile, ratio
from benchmarks.machine import Usage, peak_rss_mb, read_usage
from benchmarks.peers.peer import REPOSITORY
from jobs_lib import App, reexport
from jobs_lib.outbox.topic import Entity
from jobs_lib.postgres.database import Database
from jobs_lib.postgres.migrate import migrate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.server import Server
    from jobs_lib.devstack import KafkaBroker

NAMES = ("first", "second")
_APP = "benchmarks.reexports.rates:app"
PARTITIONS = 4
GRACE = 5.0
"""Seconds after which a re-export that goes on again is at its rate."""
UNLIMITED = 10_000_000
_ASKED_EVERY = 50
app = App("rates")
_topic = app.topic(
    os.environ.get("BENCH_TOPIC", "rates"), value=dict[str, int], compacted=True
)
for _name in NAMES:
    app.entity(_topic, source=_name, key="id", name=_name)(
        lambda conn, keys: {key: {"version": 1} for key in keys}
    )


class Stage:
    """A fresh database and topic, with a service that may be killed."""

    def __init__(self, server: Server, broker: KafkaBroker) -> None:
        server.renew()
        migrate(server.url)
        self.server, self.broker = server, broker
        self.topic = f"rates-{uuid.uuid4().hex[:8]}"
        self.database = Database(server.url)
        self._service: subprocess.Popen[bytes] | None = None
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        config = {"message.timestamp.type": "LogAppendTime"}
        made = admin.create_topics([NewTopic(self.topic, PARTITIONS, 1, config=config)])
        made[self.topic].result()

    def fill(self, name: str, keys: int) -> None:
        """Make the table of an entity."""
        with self.server.connect() as connection:
            connection.execute(f"create table {name} (id text primary key)")
            connection.execute(
                f"insert into {name} select '{name}-' || n"
                f" from generate_series(1, {keys}) n"
            )
            connection.execute(f"analyze {name}")

    def begin(self, name: str, rate: int) -> None:
        """Begin a re-export and load it all."""
        states = App("rates").topic(self.topic, value=dict[str, int], compacted=True)
        entity = Entity(name, states, name, "id", lambda _conn, _keys: {})
        reexport.start(self.database, entity, rate=rate)

    def run(self) -> None:
        """Start the service: executor and relay."""
        self._service = self._command("run", _APP)

    def start(self, name: str, rate: int) -> subprocess.Popen[bytes]:
        """Begin a re-export by the command, with Spark."""
        found = "reexport", "start", name, "--rate", str(rate), "--app", _APP
        return self._command(*found)

    def _command(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "jobs_lib.cli", *arguments],
            cwd=REPOSITORY,
            env={
                **{k: v for k, v in os.environ.items() if k[:9] != "JOBS_LIB_"},
                "JOBS_LIB_DATABASE_URL": self.server.url,
                "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": self.broker.bootstrap_servers,
                "JOBS_LIB_STALE_AFTER": "5",
                "BENCH_TOPIC": self.topic,
                "PYTHONPATH": str(REPOSITORY),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def read_usage(self) -> Usage:
        """Read the CPU of the service and of the server."""
        assert self._service is not None
        return read_usage(self._service.pid, self.server.pid)

    def read_peak_mb(self) -> float:
        """Read the most memory that the service has used since it was started."""
        assert self._service is not None
        return peak_rss_mb(self._service.pid)

    def kill(self) -> None:
        """Kill the service."""
        if self._service is not None:
            self._service.kill()
            self._service.wait()
            self._service = None

    def await_sent(self, name: str, keys: int, seconds: float = 600.0) -> None:
        """Wait until this many keys of a re-export are sent."""
        deadline = time.monotonic() + seconds
        while (found := reexport.status(self.database, name)).sent < keys:
            if time.monotonic() > deadline or found.ended:
                raise TimeoutError(f"{found} did not send {keys:,} keys")
            time.sleep(0.1)

    def read(self) -> dict[str, list[float]]:
        """Read the topic: the times of the records of each re-export, and live ones."""
        found: dict[str, list[float]] = {}
        with contextlib.closing(self._consume()) as consumer:
            ends = {
                n: consumer.get_watermark_offsets(TopicPartition(self.topic, n))[1]
                for n in range(PARTITIONS)
            }
            while ends:
                for record in consumer.consume(5_000, 0.5):
                    key = (record.key() or b"").decode().partition("-")[0]
                    found.setdefault(key, []).append(record.timestamp()[1] / 1_000)
                for place in consumer.position(
                    [TopicPartition(self.topic, n) for n in ends]
                ):
                    if place.offset >= ends[place.partition]:
                        del ends[place.partition]
        return {name: sorted(times) for name, times in found.items()}

    def _consume(self) -> Consumer:
        consumer = Consumer(
            {
                "bootstrap.servers": self.broker.bootstrap_servers,
                "group.id": "bench",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 5,
            }
        )
        consumer.assign([TopicPartition(self.topic, n, 0) for n in range(PARTITIONS)])
        return consumer

    def has_ended(self, name: str) -> bool:
        """Whether a re-export has ended."""
        return reexport.status(self.database, name).ended

    def time_live(self, count: int, beside: str | None = None) -> list[float]:
        """Time live records one by one, from the commit to a consumer.

        Args:
            count: the most records.
            beside: the re-export with whose end they end, too.
        """
        took = []
        with (
            contextlib.closing(self._consume()) as consumer,
            self.server.connect() as connection,
        ):
            for n in range(count):
                if beside and n % _ASKED_EVERY == 0 and self.has_ended(beside):
                    break
                key = f"live-{n}".encode()
                began = time.monotonic()
                connection.execute(
                    "select jobs_lib.send(%s, %s, '{\"version\": 1}', version => 1)",
                    (self.topic, key.decode()),
                )
                deadline = began + 60
                while (record := consumer.poll(0.5)) is None or record.key() != key:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"the live record {n} did not come")
                took.append(time.monotonic() - began)
                time.sleep(random.uniform(0.0, 0.04))
        return took

    def close(self) -> None:
        """End the service."""
        self.kill()


@contextlib.contextmanager
def staged(server: Server, broker: KafkaBroker) -> Iterator[Stage]:
    """A stage that ends with the block."""
    stage = Stage(server, broker)
    try:
        yield stage
    finally:
        stage.close()


def measure_rate(server: Server, broker: KafkaBroker, *, quick: bool) -> dict[str, Any]:
    """Two re-exports: one is paused and changed, and both see an outage."""
    rate, span = 6_000, 20.0 if quick else 150.0
    peaks: list[float | None] = []
    means: list[float | None] = []
    with staged(server, broker) as stage:
        for name in NAMES:
            stage.fill(name, 200_000 if not quick else 40_000)
            stage.begin(name, rate)
        stage.run()
        stage.await_sent("second", 1)
        # Times of steady sending, by the clock that Kafka shares with us.
        spans: dict[str, list[tuple[float, float, int]]] = {name: [] for name in NAMES}

        def steady(limits: dict[str, int]) -> None:
            time.sleep(GRACE)
            began = time.time()
            time.sleep(span)
            for name, limit in limits.items():
                spans[name].append((began, time.time(), limit))

        before, began = stage.read_usage(), time.monotonic()
        steady(dict.fromkeys(NAMES, rate))
        used, took = stage.read_usage() - before, time.monotonic() - began
        reexport.pause(stage.database, "first")
        steady({"second": rate})
        reexport.resume(stage.database, "first")
        reexport.set_rate(stage.database, "second", rate // 2)
        steady({"first": rate, "second": rate // 2})
        # A minute after the change, so that its window is over.
        time.sleep(0.0 if quick else 60.0)
        stage.kill()
        time.sleep(10.0)
        stage.run()
        sent = reexport.status(stage.database, "first").sent
        stage.await_sent("first", sent + 1)
        steady({"first": rate, "second": rate // 2})
        relay_mb = stage.read_peak_mb()
        found = stage.read()
    for name in NAMES:
        times = found[name]
        # The rate of the second one was lowered: its first windows have the higher.
        peaks.append(count_fullest(times) / rate)
        for began, ended, limit in spans[name]:
            count = sum(began <= at < ended for at in times)
            means.append(count / (limit * (ended - began) / 60))
    return {
        "rate_peak_ratio": max(one for one in peaks if one is not None),
        "rate_mean_ratio": min(one for one in means if one is not None),
        "rate_means": means,
        "rate_service_cores": used.worker / took,
        "rate_server_cores": used.server / took,
        "rate_relay_mb": relay_mb,
    }


def measure_live(server: Server, broker: KafkaBroker, *, quick: bool) -> dict[str, Any]:
    """Time live records without a re-export, and beside one, limited and not."""
    count = 200 if quick else 2_000
    p99: dict[str, float | None] = {}
    timed: dict[str, int] = {}
    for name, rate in (("alone", 0), ("limited", 6_000), ("unlimited", UNLIMITED)):
        with staged(server, broker) as stage:
            stage.fill("first", 400_000 if quick else 4_000_000)
            stage.run()
            loader = threading.Thread(
                target=stage.begin, args=("first", rate), daemon=True
            )
            if rate:
                loader.start()
                time.sleep(GRACE)
                stage.await_sent("first", 100)
            stage.time_live(20)
            took = stage.time_live(count, "first" if rate else None)
            p99[name], timed[name] = percentile(took, 0.99), len(took)
            if rate:
                if not stage.has_ended("first"):
                    reexport.cancel(stage.database, "first")
                loader.join(60)
    return {
        "live_records": timed,
        "live_p99_ms": {k: v and round(1_000 * v, 1) for k, v in p99.items()},
        "live_p99_x": ratio(p99["limited"], p99["alone"]),
        "live_p99_priority_only_x": ratio(p99["unlimited"], p99["alone"]),
    }


def measure_start(
    server: Server, broker: KafkaBroker, *, quick: bool
) -> dict[str, Any]:
    """From the call that starts a re-export to its first record at a consumer."""
    took: list[float | None] = []
    for _ in range(1 if quick else 3):
        with staged(server, broker) as stage:
            stage.fill("first", 100_000 if quick else 1_000_000)
            stage.run()
            began = time.time()
            command = stage.start("first", 60_000)
            while not (found := stage.read()):
                time.sleep(0.05)
            took.append(found["first"][0] - began)
            command.terminate()
            command.wait()
    return {"start_to_first_record_s": median(took)}


def measure_restart(
    server: Server, broker: KafkaBroker, *, quick: bool
) -> dict[str, Any]:
    """The records that a re-export sends whose service is killed, to its keys."""
    keys, kills = (5_000, 3) if quick else (50_000, 10)
    with staged(server, broker) as stage:
        stage.fill("first", keys)
        stage.begin("first", 300_000)
        for kill in range(1, kills + 1):
            stage.run()
            stage.await_sent("first", kill * keys // (kills + 2))
            stage.kill()
        stage.run()
        while not reexport.status(stage.database, "first").ended:
            time.sleep(0.2)
        sent = len(stage.read()["first"])
    return {"restart_extra_ratio": sent / keys, "restarts": kills}
