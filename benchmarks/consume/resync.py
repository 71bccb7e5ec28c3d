"""A read model is made equal to its topic again, and compared with its source."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.consume import peers
from benchmarks.consume.latency import await_row, make_sender
from benchmarks.consume.stage import ConsumerError, count_cpu
from benchmarks.consume.tables import READ_MODEL, find_difference, tell_writes
from benchmarks.consume.topics import State, produce
from benchmarks.consume.wire import Wire
from benchmarks.figures import percentile, ratio
from benchmarks.ownership.pods import wait_until
from jobs_lib.operating.verification import TableSide, verify
from jobs_lib.postgres.database import Database

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.bench import Bench, Figures
    from benchmarks.consume.latency import Send
    from benchmarks.consume.stage import Running, Stage
    from benchmarks.consume.tables import Connection
    from benchmarks.consume.topics import Topic
    from benchmarks.worker import Row

RECORDS = 1_000_000
SLOW_RECORDS = 100_000
SLOW_PARTITIONS = 16
DIFFERENCES = 10
_ALONE = 300
"""Live records without a re-synchronisation."""
_WARM_UP = 50
_SECONDS = 400.0
_SOURCE = "bench_source"
_ROWS = """
create table aircraft (tail text primary key, version bigint);
insert into aircraft select 'N' || n, 1 + n % 7 from generate_series(1, {rows}) n;
vacuum analyze aircraft
"""


def measure_resync(bench: Bench, stage: Stage) -> Figures:
    """Read a topic again beside the service, and by several processes."""
    slow_topic = fill_keys(stage, bench.size(SLOW_RECORDS))
    rows = bench.alternate(
        {
            "resync": partial(resync_beside, bench, stage),
            **{
                f"slow_{count}p": partial(resync_slowly, stage, slow_topic, count)
                for count in peers.SLOW_RESYNC
            },
        }
    )
    ours = rows["resync"]
    slow = {count: rows[f"slow_{count}p"].median("records_s") for count in (1, 4)}
    return {
        "resync_1m_records_s": ours.median("records_s"),
        "resync_1m_s": ours.median("seconds"),
        "live_p99_during_resync_x": ours.median("p99_x"),
        "live_p99_ms": ours.median("alone_p99_ms"),
        "live_p99_during_resync_ms": ours.median("beside_p99_ms"),
        "resync_4p_vs_1p": ratio(slow[4], slow[1]),
    }


def resync_beside(bench: Bench, stage: Stage) -> Row:
    """Re-synchronise a model that is right: first in quiet, then beside live records.

    Raises:
        ConsumerError: the table is not equal to the topic in the end.
    """
    # Nobody else reads this topic: it gets live records.
    topic = stage.topics.fill(bench.size(RECORDS), bench.size(RECORDS) + 1)
    group = f"bench-{uuid.uuid4().hex[:8]}"
    with (
        stage.prepared(READ_MODEL) as connection,
        stage.consuming(peers.READ_MODEL, topic, group=group) as service,
    ):
        _await_equal(service, connection, topic)
        tell_writes(connection)
        connection.execute("vacuum analyze aircraft_rm")
        connection.execute("checkpoint")
        with stage.consuming(peers.RESYNC, topic, group=group) as running:
            began = time.monotonic()
            _await_begin(running, connection)
            begun = time.monotonic() - began
            _await_end(running)
            seconds = time.monotonic() - began
        records, send = topic.records, make_sender(stage, topic)
        with bench.server.connect() as listening:
            listening.execute("listen rm")
            waits = partial(_send_singly, service, listening, send)
            alone = waits(_WARM_UP + bench.size(_ALONE, quick=100))[_WARM_UP:]
            with stage.consuming(peers.RESYNC, topic, group=group) as running:
                _await_begin(running, connection)
                beside = waits(0, lambda: not running.ended())
        _await_equal(service, connection, topic)
    p99, other = percentile(alone, 0.99), percentile(beside, 0.99)
    return {
        "records_s": records / seconds,
        "seconds": seconds,
        "begun_after": begun,
        "alone_p99_ms": p99,
        "beside_p99_ms": other,
        "p99_x": ratio(other, p99),
        "alone_p50_ms": percentile(alone, 0.5),
        "beside_p50_ms": percentile(beside, 0.5),
        "live_records": len(beside),
    }


def resync_slowly(stage: Stage, topic: Topic, processes: int) -> Row:
    """Fill a model by a re-synchronisation whose mapping waits 1 ms for each record.

    Counts from the first row that can be read until the last one.
    """
    count = topic.records
    peer = peers.SLOW_RESYNC[processes]
    with (
        stage.prepared(READ_MODEL) as connection,
        stage.consuming(peer, topic) as running,
    ):
        stage.await_first(running, connection, READ_MODEL)
        before, done = stage.look(running), READ_MODEL.count(connection)
        while (rows := READ_MODEL.count(connection)) < count:
            running.check()
            time.sleep(0.1)
        used = stage.look(running) - before
        _await_end(running)
    return {"records_s": (rows - done) / used.at, **count_cpu(used, rows - done)}


def measure_verify(bench: Bench, stage: Stage) -> Figures:
    """Compare a table of 1,000,000 rows with its source in another database."""
    found = bench.alternate({"verify": partial(verify_rows, bench, stage)})["verify"]
    return {
        "verify_1m_s": found.median("seconds"),
        "verify_10_differences_bytes": found.median("source_bytes"),
        "verify_model_bytes": found.median("model_bytes"),
    }


def verify_rows(bench: Bench, stage: Stage) -> Row:
    """Find the differences, without the pause between the two looks.

    Raises:
        ConsumerError: it finds others than there are.
    """
    rows = bench.size(RECORDS)
    with stage.prepared(READ_MODEL):
        urls = bench.server.url, bench.server.add(_SOURCE)
        for name in ("bench", _SOURCE):
            with bench.server.connect(name) as connection:
                for statement in _ROWS.format(rows=rows).split(";"):
                    connection.execute(statement.encode())
                if name == _SOURCE:
                    connection.execute(
                        "update aircraft set version = 9 where tail = any (%s)",
                        (
                            [
                                f"N{n * rows // DIFFERENCES + 1}"
                                for n in range(DIFFERENCES)
                            ],
                        ),
                    )
        with Wire(urls[0]) as ours, Wire(urls[1]) as theirs:
            model, source = (
                TableSide.of(Database(wire.url), "aircraft", "tail", "version")
                for wire in (ours, theirs)
            )
            began = time.monotonic()
            found = verify(source, model, pause=0)
            took = time.monotonic() - began
            if len(found) != DIFFERENCES:
                raise ConsumerError(f"{len(found)} keys differ, not {DIFFERENCES}")
            return {
                "seconds": took,
                "source_bytes": theirs.count,
                "model_bytes": ours.count,
            }


def fill_keys(stage: Stage, count: int) -> Topic:
    """Make a topic of many partitions with one state of each key."""
    topic = stage.topics.make(SLOW_PARTITIONS)
    producer = stage.topics.open_producer(**{"queue.buffering.max.messages": 500_000})
    for number in range(count):
        state = State(f"N{number:06}", 1)
        value = state.value
        topic.note(state, value)
        produce(producer, topic.name, state, value)
    if left := producer.flush(120):
        raise TimeoutError(f"{left} records of {topic.name} were not acknowledged")
    return topic


def _await_equal(running: Running, connection: Connection, topic: Topic) -> None:
    def is_equal() -> bool:
        running.check()
        return (
            READ_MODEL.progress(connection, topic) == 1
            and find_difference(connection, READ_MODEL, topic) is None
        )

    wait_until(is_equal, _SECONDS, "the table is equal to the topic", pause=0.5)


def _await_begin(running: Running, connection: Connection) -> None:
    """Wait until the re-synchronisation has noted where it begins."""

    def has_begun() -> bool:
        running.check()
        row = connection.execute("select exists (select from jobs_lib.resyncs)")
        return bool(row.fetchone() == (True,))

    wait_until(has_begun, _SECONDS, "the re-synchronisation has begun", pause=0.02)


def _await_end(running: Running) -> None:
    wait_until(running.ended, _SECONDS, "the re-synchronisation has ended", pause=0.02)


def _send_singly(
    running: Running,
    connection: Connection,
    send: Send,
    count: int,
    goes_on: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Send one state at a time, and wait for its row; returns the milliseconds."""
    waits: list[float] = []
    while len(waits) < count or goes_on():
        number = len(waits)
        key = f"live-{uuid.uuid4().hex[:8]}"
        began = send(key, 1)
        waits.append(1_000 * (await_row(running, connection, key) - began))
        # A consumer that polls must not always be at the same point.
        time.sleep(0.02 + number % 20 / 1_000)
    return waits
