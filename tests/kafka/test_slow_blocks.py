"""Slow blocks go on, record by record, while partitions move again and again."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.support.apps import make_app, running
from tests.support.records import make_producer
from tests.support.waiting import linger

EACH_SECONDS = 0.05
"""How long a record takes: a block of the most records takes five hand-overs long."""
MOST = 200
ROUNDS = 2
CALM_SECONDS = 1.0
"""A machine that stands still for longer may keep a block beyond its hand-over."""


class Work:
    """Takes its time, and notes by how much the machine made it longer."""

    def __init__(self) -> None:
        self.most = 0.0
        """The most seconds that some work took too long."""

    def do(self, records: int) -> None:
        began = time.monotonic()
        linger(EACH_SECONDS * records)
        late = time.monotonic() - began - EACH_SECONDS * records
        self.most = max(self.most, late)


@pytest.fixture
def names(topic) -> dict[str, str]:
    """A topic for each kind of consumer."""
    return {kind: topic(2) for kind in ("record", "block", "model")}


@pytest.fixture
def calls() -> Counter[tuple[str, int, int]]:
    """How often each record was handled, by the kind of consumer and its place."""
    return Counter()


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def make(database_url, bootstrap_servers, names, calls, work):
    """A function that makes the app of a pod."""

    def make(pod: str):
        app = make_app(
            database_url,
            pod=pod,
            kafka_bootstrap_servers=bootstrap_servers,
            consumer_block=MOST,
        )

        @app.consumer(names["record"], group=f"{names['record']}-g")
        def handle(record, conn) -> None:
            work.do(1)
            calls["record", record.partition, record.offset] += 1

        @app.consumer(names["block"], group=f"{names['block']}-g", per="block")
        def handle_block(records, conn) -> None:
            work.do(len(records))
            calls.update(("block", one.partition, one.offset) for one in records)

        @app.read_model(
            names["model"], table="rows", key="key", group=f"{names['model']}-g"
        )
        def make_row(record) -> dict[str, int]:
            work.do(1)
            return {"partition": record.partition, "n": record.offset}

        return app

    return make


@pytest.mark.guarantee("W77")
@pytest.mark.expects("loop.failed")
def test_slow_blocks_of_each_kind_move_on_though_partitions_move_again_and_again(
    make, names, calls, work, admin, bootstrap_servers, wait_for
):
    admin.execute(
        "create table rows (key text primary key, version bigint, partition int, n int)"
    )
    producer = make_producer(bootstrap_servers)
    for name in names.values():
        for n in range(4_000):
            producer.produce(name, b"{}", str(n), partition=n % 2)
    producer.flush(30)

    def read_offsets() -> dict[tuple[str, int], int]:
        rows = admin.execute(
            "select topic, partition, next_offset from jobs_lib.offsets"
            " where next_offset is not null"
        )
        places = [(name, number) for name in names.values() for number in range(2)]
        return dict.fromkeys(places, 0) | {(t, number): at for t, number, at in rows}

    def count_owned() -> dict[str, int]:
        rows = admin.execute(
            "select p.pod, count(*) from jobs_lib.origins o"
            " join jobs_lib.processes p on p.id = o.owner"
            " where split_part(o.role, ':', 1) = 'consume' group by 1"
        )
        return dict(rows.fetchall())

    def await_progress(owned: dict[str, int]) -> None:
        wait_for(lambda: count_owned() == owned, timeout=60, what=f"owned: {owned}")
        before = read_offsets()
        wait_for(
            lambda: all(at > before[place] for place, at in read_offsets().items()),
            timeout=60,
            what=lambda: f"all move on: {before}, {read_offsets()}",
        )

    with running(make("pod-a"), "consumers"):
        await_progress({"pod-a": 6})
        for _ in range(ROUNDS):
            with running(make("pod-b"), "consumers"):
                await_progress({"pod-a": 3, "pod-b": 3})
            await_progress({"pod-a": 6})
    offsets = read_offsets()
    # Nothing was undone, neither when a partition moved nor at the end.
    most = 1 if work.most < CALM_SECONDS else max(calls.values())
    for kind in ("record", "block"):
        for partition in range(2):
            end = offsets[names[kind], partition]
            handled = {k: n for k, n in calls.items() if k[:2] == (kind, partition)}
            assert {n for _, _, n in handled} >= {*range(end)}
            assert max(handled.values()) <= most
            assert max(n for _, _, n in handled) < end or most > 1
    for partition in range(2):
        rows = admin.execute("select n from rows where partition = %s", (partition,))
        end = offsets[names["model"], partition]
        assert sorted(n for (n,) in rows) == [*range(end)]
