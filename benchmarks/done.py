"""What places cost, and how far `<group>.done` is behind: `python -m benchmarks.done`.

With and without places alternate on one PostgreSQL with durable commits. One JSON line
at the end.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.figures import percentile, ratio
from benchmarks.server import Server
from jobs_lib import App, Job
from jobs_lib.devstack import KafkaBroker
from jobs_lib.jobs.context import Handling, Place, handled, holding
from jobs_lib.kafka.client import create_topic, make_admin
from jobs_lib.postgres.migrate import migrate
from jobs_lib.service.service import Service
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOPIC, GROUP = "flights", "bench"
_DONE = """
insert into jobs_lib.jobs (origin, type, payload, source, record_offset)
select 'local/0', 'none', '{}', %s, %s + n / 1000 from generate_series(0, %s - 1) n
"""


def make_app(server: Server, **settings: Any) -> App:
    """An app with one type of jobs that do nothing, on a new database."""
    server.renew()
    migrate(server.url)
    app = App(GROUP, settings=load_settings(database_url=server.url, **settings))
    app.job(name="noop")(noop)
    return app


def noop(job: Job, n: int) -> None:
    """Do nothing."""


def name_places(*, placed: bool) -> Iterator[Place | None]:
    """The places of records, one after the other; None for each without places."""
    number = 0
    while True:
        yield Place(f"record 1 {number}") if placed else None
        number += 1


def enqueue(app: App, places: Iterator[Place | None]) -> None:
    """Enqueue one job for each of a hundred records that follow each other."""
    with app.transaction() as conn:
        for n in range(100):
            place = next(places)
            # As a handler does it.
            token = handled.set(Handling(None, place))
            app.jobs["noop"].enqueue(conn, n=n)
            handled.reset(token)


def copy(app: App, places: Iterator[Place | None]) -> None:
    """Enqueue a thousand jobs of one record, by COPY."""
    with app.transaction() as conn, holding(next(places)):
        app.jobs["noop"].enqueue_many(conn, [{"n": n} for n in range(1_000)])


def compare_calls(
    call: Callable[[App, Iterator[Place | None]], None], server: Server, calls: int
) -> float | None:
    """The median time without places, as a share of that with them.

    They alternate call by call: so whatever else the machine does slows both.
    """
    app = make_app(server)
    times: dict[bool, list[float]] = {True: [], False: []}
    placed, unplaced = name_places(placed=True), name_places(placed=False)
    for number in range(2 * calls):
        places = placed if number % 2 else unplaced
        began = time.perf_counter()
        call(app, places)
        times[bool(number % 2)].append(time.perf_counter() - began)
    app.close()
    with_, without = (statistics.median(times[one]) for one in (True, False))
    tell(f"{call.__name__} with {1e3 * with_:.2f} ms, without {1e3 * without:.2f} ms")
    return ratio(without, with_)


def drain(server: Server, jobs: int, *, placed: bool) -> float:
    """Run jobs that wait, one of each record; returns jobs a second."""
    app = make_app(server)
    with server.connect() as admin:
        admin.execute(
            "insert into jobs_lib.jobs (origin, type, payload, source, record_offset)"
            " select 'local/' || n %% 16, 'noop', '{\"n\": 1}',"
            " case when %s then 1 end, case when %s then n end"
            " from generate_series(1, %s) n",
            (placed, placed, jobs),
        )
        server.settle()
        began = time.perf_counter()
        with running(app, "executor"):
            while admin.execute("select 1 from jobs_lib.jobs limit 1").fetchone():
                time.sleep(0.01)
        took = time.perf_counter() - began
    return jobs / took


def compare(
    measure: Callable[..., float], server: Server, jobs: int, rounds: int
) -> float | None:
    """The median rate with places, as a share of that without."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for placed in (False, True) if number % 2 else (True, False):
            rates[placed].append(measure(server, jobs, placed=placed))
            tell(f"{measure.__name__} placed={placed} {rates[placed][-1]:,.0f} jobs/s")
    return ratio(statistics.median(rates[True]), statistics.median(rates[False]))


def measure_behind(
    server: Server, broker: KafkaBroker, records: int, done: int
) -> dict[str, float | None]:
    """How long after its job each record is told, before and after many were done."""
    topic = f"{TOPIC}-{uuid.uuid4().hex[:8]}"
    app = make_app(server, kafka_bootstrap_servers=broker.bootstrap_servers)
    create_topic(make_admin(app.settings), topic, 1, {})
    ended: dict[int, float] = {}

    @app.job()
    def work(job: Job, n: int) -> None:
        ended[n] = time.perf_counter()

    @app.consumer(topic, group=GROUP, done=True)
    def handle(record: Any, conn: Any) -> None:
        work.enqueue(conn, n=record.offset)

    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    found: dict[str, float | None] = {}
    with running(app), server.connect() as admin:
        for name in ("done_behind_ms_p99", f"done_behind_ms_p99_after_{done}"):
            first = len(ended)
            told = follow(broker, topic, first + records)
            for n in range(records):
                producer.produce(topic, value=str(n))
                producer.poll(0)
                time.sleep(0.005)
            producer.flush(30)
            seen = told()
            behind = [
                seen[n] - ended[n] for n in range(first, first + records) if n in ended
            ]
            found[name] = 1_000 * (percentile(behind, 0.99) or 0)
            # As many jobs with places come and go, and nothing vacuums them away.
            admin.execute("alter table jobs_lib.jobs set (autovacuum_enabled = off)")
            admin.execute(_DONE, (1, first + records, done))
            admin.execute("delete from jobs_lib.jobs where type = 'none'")
    return found


def follow(
    broker: KafkaBroker, topic: str, records: int
) -> Callable[[], dict[int, float]]:
    """Note when the group `<group>.done` is first above each record."""
    seen: dict[int, float] = {}

    def watch() -> None:
        consumer = Consumer(
            {"bootstrap.servers": broker.bootstrap_servers, "group.id": f"{GROUP}.done"}
        )
        at = 0
        while at < records:
            (answer,) = consumer.committed([TopicPartition(topic, 0)], timeout=30)
            now = time.perf_counter()
            for n in range(at, answer.offset):
                seen[n] = now
            at = max(at, answer.offset)
            time.sleep(0.01)
        consumer.close()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def wait() -> dict[int, float]:
        thread.join(120)
        return seen

    return wait


@contextmanager
def running(app: App, *parts: str) -> Iterator[None]:
    """Run parts of the app in this process."""
    service = Service(app, parts or ("consumers", "executor"))
    service.start()
    try:
        yield
    finally:
        service.stop()


def tell(line: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(f"{line}\n")


@click.command()
@click.option("--calls", default=500, show_default=True, help="That enqueue.")
@click.option("--rounds", default=21, show_default=True, help="Of the drain.")
@click.option("--jobs", default=50_000, show_default=True, help="Of each round.")
@click.option("--done", default=1_000_000, show_default=True, help="Finished jobs.")
def main(calls: int, rounds: int, jobs: int, done: int) -> None:
    """Measure what places cost on this machine."""
    with Server() as server, KafkaBroker.ephemeral() as broker:
        figures = measure_done(server, broker, calls, rounds, jobs, done)
    sys.stdout.write(json.dumps({"benchmark": "done", **figures}) + "\n")


def measure_done(
    server: Server,
    broker: KafkaBroker,
    calls: int = 500,
    rounds: int = 21,
    jobs: int = 50_000,
    done: int = 1_000_000,
) -> dict[str, float | None]:
    """Measure what places cost, and how long after its jobs a record is told.

    Args:
        server: its database is made anew.
        broker: gets topics of its own.
        calls: that enqueue.
        rounds: of the drain.
        jobs: of each round.
        done: jobs that are finished before records are told once more.
    """
    figures = {
        "enqueue_with_places_vs_without": compare_calls(enqueue, server, calls),
        "copy_with_places_vs_without": compare_calls(copy, server, calls),
        "drain_with_places_vs_without": compare(drain, server, jobs, rounds),
        **measure_behind(server, broker, 2_000, done),
    }
    return {name: value and round(value, 3) for name, value in figures.items()}


if __name__ == "__main__":
    main()
