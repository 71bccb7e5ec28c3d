"""Rebalances: their cost to origins that move, and to those that do not."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer

from benchmarks.figures import percentile, ratio
from benchmarks.ownership.pods import deployed, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bench import Bench, Figures
    from benchmarks.ownership.pods import Deployment
    from benchmarks.server import Server
    from jobs_lib.devstack import KafkaBroker

PARTITIONS = 12
_EVERY = 0.1
"""Seconds between two jobs of an origin while pauses are measured.

The origins take turns, so that no job waits for those of others.
"""
_SETTLED = 2.0
"""Seconds after which a rebalance has had its effect."""

Owners = dict[str, tuple[str, int]]


def measure_follow(bench: Bench, broker: KafkaBroker) -> Figures:
    """Run three services with sidecars; a guest joins and leaves the group again."""
    rebalances = bench.size(50, quick=6)
    raised = moved = 0
    with (
        deployed(
            bench.server,
            broker,
            partitions=PARTITIONS,
            sidecars=True,
            assignment_strategy="range",
        ) as pods,
        bench.server.connect() as connection,
    ):
        names = ("pod-a", "pod-b", "pod-c")
        pods.start(*names)
        pods.await_shared(connection, *names, seconds=120)
        before = _settled(pods, connection, PARTITIONS)
        epochs = _epochs(connection)
        for _ in range(rebalances // 2):
            with guest(pods, "range") as assigned:
                left = PARTITIONS - len(assigned)
                between = _settled(pods, connection, left)
            after = _settled(pods, connection, PARTITIONS)
            # An origin moves to another owner, or back to its owner after a release.
            moved += _moves(before, between) + _moves(between, after)
            before = after
        raised = sum(_epochs(connection).values()) - sum(epochs.values())
    bench.tell(f"{rebalances} rebalances: {moved} moves, {raised} epochs")
    return {
        "follow_rebalances": rebalances,
        "follow_moved_origins": moved,
        "follow_epochs_per_moved_origin": ratio(raised, moved),
    }


def measure_pauses(bench: Bench, broker: KafkaBroker) -> Figures:
    """How long jobs of origins that do not move wait, for each strategy."""
    figures: Figures = {}
    for strategy in ("cooperative-sticky", "range"):
        name = strategy.partition("-")[0]
        waits, calm = _pauses(bench, broker, strategy)
        suffix = "" if name == "cooperative" else f"_{name}"
        for kind, spans in (("rebalance", waits), ("no_rebalance", calm)):
            every = [wait for span in spans for wait in span]
            longest = [max(span) for span in spans]
            figures[f"{kind}_pause_p99_ms{suffix}"] = percentile(every, 0.99)
            figures[f"{kind}_longest_p50_ms{suffix}"] = percentile(longest, 0.5)
            figures[f"{kind}_longest_p99_ms{suffix}"] = percentile(longest, 0.99)
        bench.tell(f"{strategy}: {sum(map(len, waits))} jobs, {figures}")
    return figures


def _pauses(
    bench: Bench, broker: KafkaBroker, strategy: str
) -> tuple[list[list[float]], list[list[float]]]:
    """The waits in each unmoved origin, in each rebalance and without one."""
    spans: list[tuple[float, float, set[str]]] = []
    calm: list[tuple[float, float, set[str]]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        deployed(
            bench.server, broker, partitions=PARTITIONS, assignment_strategy=strategy
        ) as pods,
        bench.server.connect() as connection,
    ):
        pods.notes = Path(folder, "notes")
        pods.start("pod-a", "pod-b")
        pods.await_shared(connection, "pod-a", "pod-b", seconds=120)
        with _enqueuing(bench.server, pods) as enqueued:
            before = _settled(pods, connection, PARTITIONS)
            for _ in range(bench.size(10, quick=3)):
                start = time.monotonic()
                # This is as long as each rebalance below is observed.
                time.sleep(2 * _SETTLED)
                calm.append((start, time.monotonic(), {*pods.origins}))
                start = time.monotonic()
                with guest(pods, strategy) as assigned:
                    time.sleep(_SETTLED)
                    between = _settled(pods, connection, PARTITIONS - len(assigned))
                    spans.append((start, time.monotonic(), _stayed(before, between)))
                    start = time.monotonic()
                time.sleep(_SETTLED)
                after = _settled(pods, connection, PARTITIONS)
                spans.append((start, time.monotonic(), _stayed(between, after)))
                before = after
        rows = pods.read_notes()
    waits: dict[str, list[tuple[float, float]]] = {}
    for job, origin, at in rows:
        waits.setdefault(origin, []).append((enqueued[job], at - enqueued[job]))
    return _choose(waits, spans), _choose(waits, calm)


def _choose(
    waits: dict[str, list[tuple[float, float]]],
    spans: list[tuple[float, float, set[str]]],
) -> list[list[float]]:
    """The milliseconds that the jobs of each origin waited, in each span."""
    return [
        [1_000 * wait for at, wait in waits[origin] if start <= at <= end]
        for start, end, origins in spans
        for origin in origins
    ]


@contextlib.contextmanager
def guest(pods: Deployment, strategy: str) -> Iterator[list[Any]]:
    """A member of the group that does nothing; yields its assignment."""
    assert pods.broker is not None
    consumer = Consumer(
        {
            "bootstrap.servers": pods.broker.bootstrap_servers,
            "group.id": f"{pods.topic}-group",
            "client.id": "guest",
            "partition.assignment.strategy": strategy,
            "session.timeout.ms": "6000",
            "heartbeat.interval.ms": "300",
            "enable.auto.commit": False,
        }
    )
    assigned: list[Any] = []
    left = threading.Event()

    def note(_: Consumer, partitions: list[Any]) -> None:
        assigned.extend(partitions)

    def poll() -> None:
        while not left.is_set():
            consumer.poll(0.05)

    consumer.subscribe([pods.topic], on_assign=note)
    thread = threading.Thread(target=poll)
    thread.start()
    try:
        wait_until(lambda: assigned, 60, "the guest has partitions")
        yield assigned
    finally:
        left.set()
        thread.join()
        consumer.close()


@contextlib.contextmanager
def _enqueuing(server: Server, pods: Deployment) -> Iterator[dict[int, float]]:
    """A steady stream of jobs into each origin; yields each commit time, by id."""
    stop = threading.Event()
    enqueued: dict[int, float] = {}

    def enqueue() -> None:
        with server.connect() as connection:
            due = time.monotonic()
            for origin in itertools.cycle(pods.origins):
                if stop.wait(max(0.0, due - time.monotonic())):
                    return
                enqueued[pods.enqueue_note(connection, origin)] = time.monotonic()
                due += _EVERY / len(pods.origins)

    thread = threading.Thread(target=enqueue)
    thread.start()
    try:
        yield enqueued
    finally:
        stop.set()
        thread.join()


def _settled(pods: Deployment, connection: Any, count: int) -> Owners:
    """The owners once this many origins have one and nothing changes for a while."""
    seen: Owners = {}
    since = time.monotonic()

    def calm() -> bool:
        nonlocal seen, since
        found = pods.owners(connection)
        if found != seen:
            seen, since = found, time.monotonic()
        return len(found) == count and time.monotonic() - since > 1.0

    wait_until(calm, 60, lambda: f"{count} origins have an owner: {seen}", pause=0.1)
    return seen


def _stayed(before: Owners, after: Owners) -> set[str]:
    return {o for o in before if o in after and before[o][0] == after[o][0]}


def _moves(before: Owners, after: Owners) -> int:
    """Count the origins that have a new owner."""
    return len(after.keys() - _stayed(before, after))


def _epochs(connection: Any) -> dict[str, int]:
    return dict(
        connection.execute(
            "select origin, epoch from jobs_lib.origins where role = 'execute'"
        ).fetchall()
    )
