"""Handlers that take whole blocks, and blocks of a size of their own."""

from __future__ import annotations

import itertools
import threading

import pytest

from tests.support.apps import heard, running
from tests.support.records import key_of, produce
from tests.support.waiting import linger


@pytest.mark.guarantee("S23")
def test_a_handler_per_block_gets_the_records_of_a_partition_in_order(
    make, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for
):
    name = topic(2)
    app = make()
    blocks: list[list[tuple[int, int]]] = []

    @app.consumer(name, group=f"{name}-g", per="block", block=10)
    def handle(records, conn) -> None:
        blocks.append([(one.partition, one.offset) for one in records])
        with conn.cursor() as cursor:
            cursor.executemany(seen, [(one.partition, one.value) for one in records])

    for partition in range(2):
        key = key_of(partition, 2)
        produce(bootstrap_servers, name, [(key, n) for n in range(25)])
    with running(app, "consumers"):
        wait_for(
            lambda: read_offsets(name) == {0: 25, 1: 25}, timeout=30, what="all is in"
        )
    assert read_seen(0) == read_seen(1) == [*range(25)]
    assert max(map(len, blocks)) == 10
    for block in blocks:
        partition, first = block[0]
        assert block == [(partition, first + n) for n in range(len(block))]


@pytest.mark.guarantee("S23", "S7")
def test_a_block_ends_where_the_next_record_has_another_handler(
    make, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    app = make()
    found: list[tuple[str, list[int]]] = []

    @app.consumer(name, group=f"{name}-g", type="a", type_field="kind", per="block")
    def handle_block(records, conn) -> None:
        found.append(("a", [one.value["n"] for one in records]))

    @app.consumer(name, group=f"{name}-g", type="b", type_field="kind")
    def handle_one(record, conn) -> None:
        found.append(("b", [record.value["n"]]))

    values = [{"kind": kind, "n": n} for n, kind in enumerate("aaabba")]
    produce(bootstrap_servers, name, [("k", value) for value in values])
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 6}, timeout=30, what="all is in")
    assert [n for _, numbers in found for n in numbers] == [*range(6)]
    kinds = {kind: [n for k, ns in found if k == kind for n in ns] for kind in "ab"}
    assert kinds == {"a": [0, 1, 2, 5], "b": [3, 4]}
    assert max(len(numbers) for kind, numbers in found if kind == "b") == 1


@pytest.mark.parametrize("bad", [0, 7, 19])
def test_a_record_that_fails_a_block_is_found_and_the_others_go_in(
    make, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for, bad
):
    name = topic(1)
    app = make()
    fixed = threading.Event()

    @app.consumer(name, group=f"{name}-g", per="block")
    def handle(records, conn) -> None:
        for one in records:
            if one.value == bad and not fixed.is_set():
                raise ValueError("cannot handle this")
            conn.execute(seen, (one.partition, one.value))

    produce(bootstrap_servers, name, [("k", n) for n in range(20)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: len(failed) > 1, timeout=30, what="it is reported")
        assert read_offsets(name) == ({0: bad} if bad else {})
        fixed.set()
        wait_for(lambda: read_offsets(name) == {0: 20}, timeout=30, what="all is in")
    assert {fields["offset"] for _, fields in failed} == {bad}
    assert read_seen() == [*range(20)]


def test_a_record_of_a_block_that_cannot_be_read_is_named_at_once(
    make, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    app = make()
    calls: list[list[int]] = []

    @app.consumer(name, group=f"{name}-g", per="block", value=int)
    def handle(records, conn) -> None:
        calls.append([one.value for one in records])

    records = [("k", n if n != 7 else "seven") for n in range(20)]
    produce(bootstrap_servers, name, records)
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=30, what="it is reported")
        assert read_offsets(name) == {0: 7}
    assert {fields["offset"] for _, fields in failed} == {7}
    # No record was handled twice, and none alone.
    assert [n for call in calls for n in call] == [*range(7)]


@pytest.mark.guarantee("W77")
def test_blocks_that_fail_only_as_a_whole_are_told_and_become_smaller(
    make, bootstrap_servers, topic, seen, read_seen, read_offsets, wait_for
):
    name = topic(1)
    app = make(consumer_block=100)
    calls: list[int] = []

    @app.consumer(name, group=f"{name}-g", per="block")
    def handle(records, conn) -> None:
        calls.append(len(records))
        if len(records) > 4:
            raise ValueError("too many at once")
        for one in records:
            conn.execute(seen, (one.partition, one.value))

    produce(bootstrap_servers, name, [("k", n) for n in range(100)])
    with heard("block.failed") as failed, running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 100}, timeout=30, what="all is in")
    counts = [fields["count"] for _, fields in failed]
    # Each failed once, and was half as large as the one before.
    assert counts == [size for size in calls if size > 4]
    assert all(2 * b <= a for a, b in itertools.pairwise(counts))
    assert {str(fields["error"]) for _, fields in failed} == {
        "ValueError: too many at once"
    }
    assert read_seen() == [*range(100)]


@pytest.mark.guarantee("W78")
def test_a_consumer_has_blocks_of_its_own_size_and_time(
    make, bootstrap_servers, topic, read_offsets, wait_for
):
    names = [topic(1) for _ in range(3)]
    app = make(consumer_block=100, consumer_block_seconds=60.0)

    @app.consumer(names[0], group=f"{names[0]}-g", block=7)
    def handle(record, conn) -> None: ...

    @app.consumer(names[1], group=f"{names[1]}-g", block_seconds=0.01)
    def linger_at_each(record, conn) -> None:
        linger(0.02)

    @app.consumer(names[2], group=f"{names[2]}-g")
    def as_the_settings_say(record, conn) -> None: ...

    with heard("records.applied") as applied:
        for name in names:
            produce(bootstrap_servers, name, [("k", n) for n in range(20)])
        with running(app, "consumers"):
            for name in names:
                wait_for(
                    lambda name=name: read_offsets(name) == {0: 20},
                    timeout=30,
                    what="all is in",
                )
    counts: dict[str, list[int]] = {name: [] for name in names}
    for _, fields in applied:
        counts[fields["origin"].rpartition("/")[0]].append(fields["count"])
    assert max(counts[names[0]]) <= 7
    assert counts[names[1]] == [1] * 20
    assert max(counts[names[2]]) > 7
