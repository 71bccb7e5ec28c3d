"""How soon a record can be seen in the table while nothing else happens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from benchmarks.consume import peers, statements
from benchmarks.consume.stage import ConsumerError
from benchmarks.consume.tables import READ_MODEL, tell_writes
from benchmarks.consume.topics import State, Topic
from benchmarks.figures import percentile
from benchmarks.relay.stage import staged
from jobs_lib import App
from jobs_lib.postgres.migrate import migrate
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bench import Bench, Figures
    from benchmarks.consume.peers import Peer
    from benchmarks.consume.stage import Running, Stage
    from benchmarks.worker import Row

_WARM_UP = 50
_START_SECONDS = 120.0
_READER = "bench_reader"
Send = Callable[[str, int], float]
"""Sends the state of a key; returns the clock's time from which on it counts."""


def measure_visible(bench: Bench, stage: Stage) -> Figures:
    """Measure from the broker's answer until the row can be read."""
    consumers = {peer.name: peer for peer in (peers.READ_MODEL, *stage.peers.values())}
    rows = bench.alternate(
        {name: partial(visible, bench, stage, peer) for name, peer in consumers.items()}
    )
    ours = rows["read_model"]
    return {
        "visible_p50_ms": ours.median("p50_ms"),
        "visible_p99_ms": ours.median("p99_ms"),
        **{
            f"visible_{figure}_{name}": rows[name].median(figure)
            for name in stage.peers
            for figure in ("p50_ms", "p99_ms")
        },
    }


def visible(bench: Bench, stage: Stage, peer: Peer) -> Row:
    """The latency of a consumer."""
    topic = stage.topics.make()
    send = make_sender(stage, topic)
    with stage.prepared(READ_MODEL) as connection:
        tell_writes(connection)
        with stage.consuming(peer, topic, **peer.idle) as running:
            return _send_singly(bench, stage, running, "bench", send)


def make_sender(stage: Stage, topic: Topic) -> Send:
    """A function that sends a state to a topic, which takes note of it."""
    producer = stage.topics.open_producer(**{"linger.ms": 0})

    def send(key: str, number: int) -> float:
        acknowledged: list[float] = []

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                raise ConsumerError(f"Kafka did not take a record: {error}")
            acknowledged.append(time.monotonic())

        state = State(key, number)
        value = state.value
        topic.note(state, value)
        producer.produce(
            topic.name,
            value,
            key,
            headers=state.headers,
            on_delivery=delivered,
        )
        producer.flush(10)
        return acknowledged[0]

    return send


def measure_databases(bench: Bench, stage: Stage) -> Figures:
    """Measure from a commit in one database until the row is in another one."""
    rows = bench.alternate(
        {
            "database_to_database": partial(between_databases, bench, stage),
            "bridge": partial(over_bridge, bench, stage),
        }
    )
    return {
        f"{name}_{figure}": rows[name].median(figure)
        for name in rows
        for figure in ("p50_ms", "p99_ms")
    }


def between_databases(bench: Bench, stage: Stage) -> Row:
    """The latency through outbox, relay, topic and read model."""
    with contextlib.ExitStack() as opened:
        source = opened.enter_context(staged(bench.server, stage.broker))
        reader = bench.server.add(_READER)
        migrate(reader)
        with bench.server.connect(_READER) as connection:
            READ_MODEL.make(connection)
            tell_writes(connection)
        opened.enter_context(source.relaying())
        running = opened.enter_context(
            stage.consuming(peers.READ_MODEL, Topic(source.topic), database=reader)
        )
        writer = opened.enter_context(psycopg.connect(bench.server.url))
        settings = load_settings(database_url=bench.server.url)
        states = App("bench", settings=settings).topic(source.topic, value=bytes)

        def send(key: str, number: int) -> float:
            value = State(key, number).value
            assert value is not None
            states.send(writer, key=key, value=value, version=number)
            writer.commit()
            return time.monotonic()

        return _send_singly(bench, stage, running, _READER, send)


def over_bridge(bench: Bench, stage: Stage) -> Row:
    """The latency through the same parts by two loops, which check nothing."""
    topic = stage.topics.make()
    reader = bench.server.add(_READER)
    with contextlib.ExitStack() as opened:
        source = opened.enter_context(stage.prepared(READ_MODEL))
        source.execute(statements.BRIDGE)
        with bench.server.connect(_READER) as connection:
            READ_MODEL.make(connection)
            tell_writes(connection)
        opened.enter_context(stage.consuming(peers.BRIDGE["relay"], topic))
        running = opened.enter_context(
            stage.consuming(peers.BRIDGE["read"], topic, database=reader)
        )
        writer = opened.enter_context(psycopg.connect(bench.server.url))

        def send(key: str, number: int) -> float:
            writer.execute(statements.WRITE_BRIDGE, (key, State(key, number).value))
            writer.commit()
            return time.monotonic()

        return _send_singly(bench, stage, running, _READER, send)


def _send_singly(
    bench: Bench, stage: Stage, running: Running, database: str, send: Send
) -> Row:
    """Send states one at a time, once the consumer is warm; wait for each row."""
    count = bench.size(300, quick=50)
    waits = []
    with bench.server.connect(database) as connection:
        connection.execute("listen rm")
        _await_start(running, connection, send)
        for number in range(_WARM_UP + count):
            key = f"N{number:06}"
            began = send(key, number + 1)
            waits.append(1_000 * (await_row(running, connection, key) - began))
            # A consumer that polls must not always be at the same point.
            time.sleep(0.02 + number % 20 / 1_000)
    del waits[:_WARM_UP]
    return {"p50_ms": percentile(waits, 0.5), "p99_ms": percentile(waits, 0.99)}


def _await_start(
    running: Running, connection: psycopg.Connection[Any], send: Send
) -> None:
    """Send until a row is there, then let all that were sent arrive."""
    deadline = time.monotonic() + _START_SECONDS
    sent, seen = 0, 0
    while not seen:
        running.check()
        if time.monotonic() > deadline:
            raise ConsumerError(f"{running.peer.name} shows no row: {running.said}")
        send(f"start-{sent}", 1)
        sent += 1
        seen += len(list(connection.notifies(timeout=1.0, stop_after=1)))
    while seen < sent:
        came = len(list(connection.notifies(timeout=10.0, stop_after=1)))
        if not came:
            raise ConsumerError(f"{running.peer.name} shows {seen} of {sent} rows")
        seen += came


def await_row(running: Running, connection: psycopg.Connection[Any], key: str) -> float:
    """The clock's time at which the row could be read."""
    for note in _notes(connection):
        if note == key:
            return time.monotonic()
    running.check()
    raise ConsumerError(f"{running.peer.name} does not show the row {key}")


def _notes(connection: psycopg.Connection[Any]) -> Iterator[str]:
    for note in connection.notifies(timeout=10.0):
        yield note.payload
