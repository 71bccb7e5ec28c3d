"""Blocks of records: how they end, and what a record that fails costs the others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from tests.support.apps import heard, make_app, running
from tests.support.records import key_of, make_producer, produce, read_committed
from tests.support.waiting import linger


@pytest.mark.parametrize("bad", [0, 57, 99])
def test_a_record_that_fails_costs_the_others_of_its_block_one_repeat(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for, bad
):
    name = topic(1)
    calls: Counter[int] = Counter()
    app = make()

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        calls[record.value] += 1
        if record.value == bad:
            raise ValueError("cannot handle this")

    produce(bootstrap_servers, name, [("k", n) for n in range(100)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: len(failed) > 2, timeout=30, what="it is tried again")
        assert read_offsets(name) == ({0: bad} if bad else {})
    assert {fields["offset"] for _, fields in failed} == {bad}
    assert max(calls[n] for n in range(100) if n != bad) <= 2
    assert not any(calls[n] for n in range(bad + 1, 100))


def test_an_error_of_the_database_in_a_handler_is_named_and_the_others_go_on(
    make, admin, bootstrap_servers, topic, seen, read_offsets, wait_for, read_seen
):
    name = topic(2)
    app = make()

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        if record.value == 20:
            # As after a lock timeout: the connection still works.
            raise psycopg.errors.LockNotAvailable("canceling statement")
        conn.execute(seen, (record.partition, record.value))

    produce(bootstrap_servers, name, [(key_of(0, 2), n) for n in range(25)])
    with heard("record.failed", "loop.failed") as events, running(app, "consumers"):
        wait_for(lambda: len(events) > 1, timeout=30, what="it is named")
        produce(bootstrap_servers, name, [(key_of(1, 2), n) for n in range(5)])
        wait_for(
            lambda: read_offsets(name) == {0: 20, 1: 5},
            timeout=30,
            what="the good ones are in",
        )
    assert {event for event, _ in events} == {"record.failed"}
    assert {fields["offset"] for _, fields in events} == {20}
    assert read_seen() == [*range(20)]


def test_a_handler_that_costs_its_connection_twice_is_named(
    make, admin, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    app = make()

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        conn.execute("select pg_terminate_backend(pg_backend_pid())")

    produce(bootstrap_servers, name, [("k", 1)])
    with (
        heard("record.failed") as failed,
        heard("loop.failed"),
        running(app, "consumers"),
    ):
        wait_for(lambda: failed, timeout=30, what="the record is named")
    assert failed[0][1]["offset"] == 0


def test_a_row_of_a_read_model_that_costs_its_connection_is_named_and_others_go_on(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(2)
    app = make()
    admin.execute(
        "create table rows (key text primary key, version bigint, n int);"
        "create function cut() returns trigger language plpgsql as $$ begin"
        " if new.n = 5 then perform pg_terminate_backend(pg_backend_pid()); end if;"
        " return new; end $$;"
        "create trigger cut before insert on rows for each row execute function cut()"
    )
    app.read_model(name, table="rows", key="key", group=f"{name}-g")(
        lambda record: {"n": record.value}
    )
    keys = [key_of(n, 2) for n in range(2)]
    produce(bootstrap_servers, name, [(keys[0], n) for n in range(5)])
    with (
        heard("record.failed") as failed,
        heard("loop.failed"),
        running(app, "consumers"),
    ):
        wait_for(lambda: read_offsets(name) == {0: 5}, timeout=30, what="it reads")
        produce(bootstrap_servers, name, [(keys[0], 5)])
        wait_for(lambda: failed, timeout=30, what="the record is named")
        produce(bootstrap_servers, name, [(keys[1], 6)])
        wait_for(
            lambda: read_offsets(name) == {0: 5, 1: 1}, timeout=30, what="one goes on"
        )
        admin.execute("drop trigger cut on rows")
        wait_for(
            lambda: read_offsets(name) == {0: 6, 1: 1}, timeout=30, what="both go on"
        )
    assert {fields["offset"] for _, fields in failed} == {5}


@pytest.mark.guarantee("W77")
def test_a_block_ends_by_time_however_many_records_wait(
    make, admin, bootstrap_servers, topic, seen, read_offsets, wait_for, read_seen
):
    name = topic(1)
    app = make(consumer_block=1_000, consumer_block_seconds=0.2)
    committed: list[int] = []

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        linger(0.05)
        conn.execute(seen, (record.partition, record.value))

    produce(bootstrap_servers, name, [("k", n) for n in range(60)])
    with heard("records.committed") as events, running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 60}, timeout=60, what="all is in")
    committed = [fields["next_offset"] for _, fields in events]
    sizes = [b - a for a, b in zip([0, *committed], committed, strict=False)]
    # Four or five records of 50 ms, and fewer where the machine is busy.
    assert max(sizes) <= 5
    assert read_seen() == [*range(60)]


@pytest.mark.guarantee("W77")
def test_a_revocation_ends_a_block_after_the_record_in_hand(
    make, admin, bootstrap_servers, topic, seen, read_offsets, wait_for, read_seen
):
    name = topic(1)
    app = make(consumer_block=1_000, consumer_block_seconds=50.0, handover_timeout=20.0)
    begun, go = threading.Event(), threading.Event()

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        conn.execute(seen, (record.partition, record.value))
        if record.value == 3:
            begun.set()
            go.wait(60)

    produce(bootstrap_servers, name, [("k", n) for n in range(500)])
    with heard("records.committed") as committed, running(app, "consumers") as service:
        assert begun.wait(30)
        stopper = threading.Thread(target=service.stop)
        stopper.start()
        consumer: Any = service._owners[0].worker
        wait_for(
            lambda: all(one.leaving for one in consumer._partitions.values()),
            timeout=50,
            what="the partition is to leave while the fourth record is in hand",
        )
        go.set()
        stopper.join()
    assert [fields["next_offset"] for _, fields in committed] == [4]
    assert read_offsets(name) == {0: 4}
    assert read_seen() == [*range(4)]


def roll_back(conn) -> None:
    conn.rollback()


def commit(conn) -> None:
    conn.commit()


def roll_back_by_sql(conn) -> None:
    conn.execute("rollback")
    conn.execute("select 1")


def swallow(conn) -> None:
    with contextlib.suppress(psycopg.Error):
        conn.execute("select 1 / 0")


@pytest.mark.guarantee("FJ21")
@pytest.mark.parametrize("spoil", [roll_back, commit, roll_back_by_sql, swallow])
def test_no_effect_is_lost_where_a_handler_ends_or_breaks_the_transaction(
    make,
    admin,
    bootstrap_servers,
    topic,
    seen,
    read_offsets,
    wait_for,
    spoil,
    read_seen,
):
    name = topic(1)
    app = make()
    fixed = threading.Event()

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        conn.execute(seen, (record.partition, record.value))
        if record.value == 5 and not fixed.is_set():
            spoil(conn)

    produce(bootstrap_servers, name, [("k", n) for n in range(10)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: len(failed) > 1, timeout=30, what="the record is named")
        assert read_offsets(name) == {0: 5}
        assert read_seen() == [*range(5)]
        fixed.set()
        wait_for(lambda: read_offsets(name) == {0: 10}, timeout=30, what="all is in")
    assert {fields["offset"] for _, fields in failed} == {5}
    assert all("conn.transaction()" in fields["error"] for _, fields in failed)
    assert read_seen() == [*range(10)]


@pytest.mark.guarantee("FJ21")
def test_a_savepoint_undoes_what_a_handler_only_tries(
    make, admin, bootstrap_servers, topic, seen, read_offsets, wait_for, read_seen
):
    name = topic(1)
    app = make()

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        conn.execute(seen, (record.partition, record.value))
        with contextlib.suppress(psycopg.Error), conn.transaction():
            conn.execute(seen, (record.partition, -record.value))
            conn.execute("select 1 / 0")

    produce(bootstrap_servers, name, [("k", n) for n in range(10)])
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 10}, timeout=30, what="all is in")
    assert read_seen() == [*range(10)]


@pytest.mark.parametrize("to", [2, 7])
def test_an_offset_that_is_set_by_hand_counts_within_two_heartbeats(
    make, admin, bootstrap_servers, topic, seen, read_offsets, wait_for, to, read_seen
):
    name = topic(1)
    app = make(heartbeat_interval=0.5, stale_after=5.0)

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        if record.value == 5:
            raise ValueError("cannot handle this")
        conn.execute(seen, (record.partition, record.value))

    produce(bootstrap_servers, name, [("k", n) for n in range(5)])
    if to > 5:
        # The partition stands still until somebody passes two records over.
        produce(bootstrap_servers, name, [("k", 5), ("k", 6)])
    with (
        heard("offset.moved") as moved,
        heard("record.failed"),
        running(app, "consumers"),
    ):
        wait_for(lambda: read_offsets(name) == {0: 5}, timeout=30, what="all is in")
        admin.execute(
            "update jobs_lib.offsets set next_offset = %s where topic = %s", (to, name)
        )
        wait_for(lambda: moved, timeout=30, what="it is noticed, though nothing comes")
        more = 7 if to > 5 else 6
        produce(bootstrap_servers, name, [("k", n) for n in range(more, 10)])
        end = 10 if to > 5 else 9
        wait_for(lambda: read_offsets(name) == {0: end}, timeout=30, what="all is in")
    assert moved[0][1]["before"] == 5
    assert moved[0][1]["next_offset"] == to
    again = [] if to > 5 else [2, 3, 4]
    assert read_seen() == [*range(5), *again, *range(more, 10)]


def test_an_offset_that_is_set_behind_a_record_that_fails_is_told_though_others_wait(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    app = make(heartbeat_interval=0.5, stale_after=5.0)

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        if record.value == 5:
            raise ValueError("cannot handle this")

    produce(bootstrap_servers, name, [("k", n) for n in range(20)])
    with (
        heard("offset.moved") as moved,
        heard("record.failed") as failed,
        running(app, "consumers"),
    ):
        wait_for(lambda: failed, timeout=30, what="it stands still")
        admin.execute("update jobs_lib.offsets set next_offset = 7")
        wait_for(lambda: read_offsets(name) == {0: 20}, timeout=30, what="it goes on")
    ((_, fields),) = moved
    assert (fields["before"], fields["next_offset"]) == (5, 7)


def test_an_offset_that_is_set_while_records_come_counts_at_the_next_commit(
    make, admin, bootstrap_servers, topic, seen, read_offsets, wait_for, read_seen
):
    name = topic(1)
    # So rarely that only the commit can notice it.
    app = make(heartbeat_interval=60.0, stale_after=600.0)
    sets = iter([0])

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        conn.execute(seen, (record.partition, record.value))
        if record.value == 7 and (to := next(sets, None)) is not None:
            admin.execute(
                "update jobs_lib.offsets set next_offset = %s where topic = %s",
                (to, name),
            )

    produce(bootstrap_servers, name, [("k", n) for n in range(5)])
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 5}, timeout=30, what="the first are")
        produce(bootstrap_servers, name, [("k", n) for n in range(5, 10)])
        wait_for(lambda: read_offsets(name) == {0: 10}, timeout=30, what="all is in")
    assert read_seen() in (
        [*range(5), *range(10)],
        # The records before the one that set it may have been committed before.
        *([*range(5), *range(5, n), *range(10)] for n in (6, 7)),
    )


@pytest.mark.guarantee("K21")
def test_a_process_that_died_between_its_two_commits_leaves_no_lag_in_kafka(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    group = f"{name}-g"

    def told() -> int | None:
        return (read_committed(bootstrap_servers, group, name) or {}).get(0)

    app = make()

    @app.consumer(name, group=group)
    def handle(record, conn) -> None: ...

    produce(bootstrap_servers, name, [("k", n) for n in range(5)])
    # All is handled, as the database says, and Kafka has not been told.
    admin.execute(
        "insert into jobs_lib.offsets (consumer_group, topic, partition, next_offset)"
        " values (%s, %s, 0, 5)",
        (group, name),
    )
    with running(app, "consumers"):
        wait_for(lambda: told() == 5, timeout=30, what=lambda: f"Kafka knows: {told()}")
    assert read_offsets(name) == {0: 5}


@pytest.mark.guarantee("K21")
def test_a_topic_that_ends_with_the_marker_of_a_transaction_has_no_lag_in_kafka(
    make, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    app = make(heartbeat_interval=0.5)

    @app.consumer(name, group=name)
    def handle(record, conn) -> None: ...

    def told() -> dict[int, int] | None:
        return read_committed(bootstrap_servers, name, name)

    producer = Producer(
        {"bootstrap.servers": bootstrap_servers, "transactional.id": name}
    )
    producer.init_transactions(60)
    with running(app, "consumers"):
        for end in (4, 8):
            producer.begin_transaction()
            for n in range(3):
                producer.produce(name, str(n).encode(), b"k")
            producer.commit_transaction(60)
            wait_for(
                lambda end=end: told() == {0: end},
                timeout=30,
                what="Kafka is told the place behind the marker",
            )
            # The offset in the database is that behind the last record.
            assert read_offsets(name) == {0: end - 1}


@pytest.mark.slow
@pytest.mark.guarantee("K21")
@pytest.mark.expects("loop.failed")
def test_kafka_is_told_again_what_it_did_not_acknowledge(
    database_url, admin, own_broker, read_offsets, wait_for
):
    name = own_broker.create(1)
    app = make_app(database_url, kafka_bootstrap_servers=own_broker.bootstrap_servers)
    group = f"{name}-g"

    @app.consumer(name, group=group)
    def handle(record, conn) -> None: ...

    def told() -> dict[int, int] | None:
        return read_committed(own_broker.bootstrap_servers, group, name)

    with running(app, "consumers"):
        produce(own_broker.bootstrap_servers, name, [("k", n) for n in range(5)])
        wait_for(lambda: told() == {0: 5}, timeout=60, what="the first are told")
        with heard("records.committed") as committed:
            produce(own_broker.bootstrap_servers, name, [("k", n) for n in range(5)])
            # In the database; the broker goes before it is told.
            wait_for(lambda: committed, timeout=30, what="the next are in")
            with own_broker.down():
                linger(2)
        wait_for(lambda: told() == {0: 10}, timeout=90, what=lambda: f"Kafka: {told()}")


@pytest.mark.parametrize("timestamp", [1, 2**62], ids=["1970", "never"])
def test_a_record_counts_whatever_time_its_producer_gave_it(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for, timestamp
):
    name = topic(1, config={"message.timestamp.after.max.ms": str(2**63 - 1)})
    app = make()
    times = []

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        times.append(record.timestamp.year)

    producer = make_producer(bootstrap_servers)
    producer.produce(name, key="k", value=b"1", timestamp=timestamp)
    assert producer.flush(30) == 0
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 1}, timeout=30, what="it is in")
    year = 1970 if timestamp == 1 else 9999
    assert times == [year]
    (appended,) = admin.execute(
        "select extract(year from appended_at at time zone 'UTC')::int"
        " from jobs_lib.offsets where topic = %s",
        (name,),
    ).fetchone()
    assert appended == year


@pytest.mark.parametrize("versions", ["side", "row"])
def test_a_read_model_takes_a_record_whatever_time_its_producer_gave_it(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for, versions
):
    name = topic(1, config={"message.timestamp.after.max.ms": str(2**63 - 1)})
    columns = "" if versions == "side" else ", version bigint"
    admin.execute(f"create table model (id text primary key{columns})")
    app = make()
    declare = app.read_model(
        name, table="model", key="id", group=f"{name}-g", versions=versions
    )
    declare(lambda record: {})
    producer = make_producer(bootstrap_servers)
    # In nanoseconds, as some producers write by mistake.
    for key, value in [("k", b"1"), ("gone", b"1"), ("gone", None)]:
        producer.produce(name, key=key, value=value, timestamp=time.time_ns())
        assert producer.flush(30) == 0
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 3}, timeout=30, what="all is in")
    assert admin.execute("select id from model").fetchall() == [("k",)]


@pytest.mark.guarantee("W77")
def test_a_slow_partition_keeps_no_other_waiting_and_loses_nothing(
    make, topic, read_offsets, bootstrap_servers, wait_for
):
    name = topic(2)
    # A third of the records of either partition may wait in memory.
    count, app = 4_000, make(consumer_prefetch_bytes=1_048_576)
    handled: dict[int, list[int]] = {0: [], 1: []}
    may_go_on = threading.Event()

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        # None before it: they might be a block of their own.
        if record.partition == 0 and record.value == 0:
            may_go_on.wait(60)
        handled[record.partition].append(record.value)

    for partition in range(2):
        key = key_of(partition, 2)
        produce(bootstrap_servers, name, [(key, n) for n in range(count)])
    with running(app, "consumers"):
        try:
            wait_for(
                lambda: read_offsets(name).get(1) == count,
                timeout=60,
                what="the other partition is through",
            )
            assert 0 not in read_offsets(name)
        finally:
            may_go_on.set()
        wait_for(
            lambda: read_offsets(name) == {0: count, 1: count},
            timeout=60,
            what="the slow one, too",
        )
    assert handled == {0: [*range(count)], 1: [*range(count)]}
