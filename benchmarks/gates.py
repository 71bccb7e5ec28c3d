"""Gates between services, and Kafka as the source of truth: `make bench-gates`.

All pieces run one after the other, on one PostgreSQL with durable commits and one
broker. One JSON line at the end.
"""

from __future__ import annotations

import json
import re
import sys
import time
import uuid
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from threading import Event, current_thread
from typing import TYPE_CHECKING, Any

import click
from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.done import make_app, measure_done, running, tell
from benchmarks.figures import median, percentile, ratio
from benchmarks.publish import measure_publish
from benchmarks.server import Server
from benchmarks.tenants import measure_tenants
from jobs_lib import telemetry
from jobs_lib.devstack import KafkaBroker
from jobs_lib.devstack.kafka import FAST_JVM
from jobs_lib.kafka import client
from jobs_lib.kafka.client import create_topic, make_admin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from jobs_lib import App

GROUP, OTHER = "own", "other"
PARTITIONS = 4
QUIET_SECONDS = 20.0
_LONG = 120.0


class Stage:
    """A topic of its own, a group that others wait for, and the app that waits."""

    def __init__(
        self, server: Server, broker: KafkaBroker, partitions: int = PARTITIONS
    ) -> None:
        self.app: App = make_app(
            server, kafka_bootstrap_servers=broker.bootstrap_servers
        )
        self.topic = f"gate-{uuid.uuid4().hex[:8]}"
        self.group = f"{self.topic}-{GROUP}"
        self.other = f"{self.topic}-{OTHER}"
        self.partitions = partitions
        create_topic(make_admin(self.app.settings), self.topic, partitions, {})
        self._servers = broker.bootstrap_servers
        self._other = Consumer(
            {"bootstrap.servers": self._servers, "group.id": self.other}
        )

    def fill(self, count: int) -> None:
        """Produce so many records, to the partitions in turn."""
        fill(self._servers, self.topic, self.partitions, count)

    def fill_elsewhere(self, count: int) -> None:
        """The same in a process of its own, so that its memory is not this one's."""
        work = self._servers, self.topic, self.partitions, count
        process = get_context("spawn").Process(target=fill, args=work)
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the producer has ended with {process.exitcode}")

    def commit(self, offset: int) -> None:
        """Let the other group have handled all partitions up to an offset."""
        places = [
            TopicPartition(self.topic, number, offset)
            for number in range(self.partitions)
        ]
        self._other.commit(offsets=places, asynchronous=False)

    def close(self) -> None:
        """Close the clients."""
        self._other.close()
        self.app.close()


def fill(servers: str, topic: str, partitions: int, count: int) -> None:
    """Produce so many records, to the partitions in turn."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5})
    for number in range(count):
        while True:
            try:
                producer.produce(topic, b"1" * 100, partition=number % partitions)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    if producer.flush(_LONG):
        raise RuntimeError("the broker does not take all records in time")


@contextmanager
def staged(stage: Stage) -> Iterator[Stage]:
    """Close a stage at the end."""
    try:
        yield stage
    finally:
        stage.close()


def measure_open(
    server: Server, broker: KafkaBroker, records: int, rounds: int
) -> dict[str, float | None]:
    """Handle records behind an open gate, and without any, by turns."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for gated in (False, True) if number % 2 else (True, False):
            with staged(Stage(server, broker)) as stage:
                rates[gated].append(handle_all(stage, records, gated=gated))
                tell(f"gated={gated} {rates[gated][-1]:,.0f} records/s")
    return {"gate_open_vs_none": ratio(median(rates[True]), median(rates[False]))}


def handle_all(stage: Stage, records: int, *, gated: bool) -> float:
    """Handle so many records; returns how many in a second."""
    after = [(stage.topic, stage.other)] if gated else []
    handled, ended = 0, Event()

    @stage.app.consumer(stage.topic, group=stage.group, after=after)
    def handle(record: Any, conn: Any) -> None:
        nonlocal handled
        handled += 1
        if handled == 1:
            began.append(time.perf_counter())
        if handled == records:
            ended.set()

    began: list[float] = []
    stage.fill(records)
    stage.commit(records // stage.partitions)
    with running(stage.app, "consumers"):
        if not ended.wait(_LONG):
            raise RuntimeError(f"{handled:,} of {records:,} records in {_LONG:g} s")
        return records / (time.perf_counter() - began[0])


def measure_release(
    server: Server, broker: KafkaBroker, releases: int
) -> dict[str, float | None]:
    """Let go one record after the other; how long after the commit is it handled?"""
    waits: list[float] = []
    with staged(Stage(server, broker, 1)) as stage:
        handled = [Event() for _ in range(releases)]

        @stage.app.consumer(
            stage.topic, group=stage.group, after=[(stage.topic, stage.other)]
        )
        def handle(record: Any, conn: Any) -> None:
            handled[record.offset].set()

        stage.fill(releases)
        with running(stage.app, "consumers"):
            for number, one in enumerate(handled):
                # At another moment of the refresh each time.
                time.sleep(number * 0.618 % 1 * stage.app.settings.gate_refresh)
                began = time.perf_counter()
                stage.commit(number + 1)
                if not one.wait(_LONG):
                    raise RuntimeError(f"record {number} is not let go")
                if number:  # the first one waits for the start
                    waits.append(time.perf_counter() - began)
        refresh = stage.app.settings.gate_refresh
    return {
        "gate_release_ms_p50": 1000 * (percentile(waits, 0.5) or 0.0),
        "gate_release_ms_p99": 1000 * (percentile(waits, 0.99) or 0.0),
        "gate_refresh_ms": 1000 * refresh,
    }


def measure_requests(server: Server, broker: KafkaBroker) -> dict[str, float | None]:
    """Count the requests of a closed gate, with one partition and with many."""
    found: dict[str, float | None] = {}
    for partitions in (1, 1_000):
        with staged(Stage(server, broker, partitions)) as stage, counted() as count:
            closed = hold(stage)
            stage.fill(partitions)
            stage.commit(0)
            with running(stage.app, "consumers"):
                closed.wait(_LONG)
                first, began = count(), time.monotonic()
                time.sleep(QUIET_SECONDS)
                rate = (count() - first) / (time.monotonic() - began)
            found[f"admin_requests_per_s_{partitions}_partitions"] = rate
    return found


def hold(stage: Stage) -> Event:
    """Declare a consumer whose gate is closed; the event says that this was told."""
    closed = Event()

    @stage.app.consumer(
        stage.topic, group=stage.group, after=[(stage.topic, stage.other)]
    )
    def handle(record: Any, conn: Any) -> None:
        raise AssertionError

    def note(event: str, fields: Mapping[str, Any]) -> None:
        if fields["group"] == stage.group:
            closed.set()

    telemetry.listen(note, ["gate.closed"])
    return closed


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count the requests that clients send which ask for offsets and partitions."""
    totals: dict[str, int] = {}
    make: Any = client._make

    def note(statistics: str) -> None:
        told = json.loads(statistics)
        sent = [sum(one["req"].values()) for one in told["brokers"].values()]
        totals[told["name"]] = sum(sent)

    def make_counted(kind: Any, configuration: Mapping[str, Any], *more: Any) -> Any:
        asks = current_thread().name.startswith("jobs_lib positions")
        counts = {"statistics.interval.ms": 500, "stats_cb": note} if asks else {}
        return make(kind, {**configuration, **counts}, *more)

    replaced: Any = client
    replaced._make = make_counted
    try:
        yield lambda: sum(totals.values())
    finally:
        replaced._make = make


def measure_memory(
    server: Server, broker: KafkaBroker, records: int
) -> dict[str, float | None]:
    """How much this process grows while so many records wait behind a gate."""
    with staged(Stage(server, broker)) as stage:
        closed = hold(stage)
        stage.fill(records // 5)
        stage.commit(0)
        with running(stage.app, "consumers"):
            closed.wait(_LONG)
            # What waits is let go by now.
            before = read_rss()
            stage.fill_elsewhere(records - records // 5)
            highest, until = 0.0, time.monotonic() + QUIET_SECONDS
            while time.monotonic() < until:
                highest = max(highest, read_rss())
                time.sleep(0.1)
    return {"rss_closed_mb": highest - before, "records_that_wait": records}


def read_rss() -> float:
    """The memory of this process in MB."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+)", text)
    return int(found[1]) / 1024 if found else 0.0


@click.command()
@click.option("--quick", is_flag=True, help="A small part of it: is all in order?")
def main(quick: bool) -> None:
    """Measure gates and streams on this machine."""
    part = 50 if quick else 1
    with Server() as server, KafkaBroker.ephemeral(jvm=FAST_JVM) as broker:
        figures: dict[str, float | None] = {
            **measure_memory(server, broker, 1_000_000 // part),
            **measure_open(server, broker, 400_000 // part, 1 if quick else 9),
            **measure_release(server, broker, 2 if quick else 100),
            **measure_requests(server, broker),
            **measure_done(
                server, broker, 500 // part, 1 if quick else 21, 50_000 // part,
                1_000_000 // part,
            ),
            **measure_publish(server, broker, 1 if quick else 40),
            **measure_tenants(server, broker, 5_000 // part),
        }  # fmt: skip
    rounded = {name: one and round(one, 3) for name, one in figures.items()}
    sys.stdout.write(json.dumps({"benchmark": "gates", **rounded}) + "\n")


if __name__ == "__main__":
    main()
