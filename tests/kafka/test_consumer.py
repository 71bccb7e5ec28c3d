"""Consumers write state and offset in one transaction, through every fault."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient

from jobs_lib.devstack import KafkaBroker
from jobs_lib.partitioner import choose_partition
from tests.support.apps import heard, make_app, running
from tests.support.canary import VALUE
from tests.support.records import key_of, produce
from tests.support.topics import create_topic

if TYPE_CHECKING:
    from jobs_lib import Job


@pytest.fixture
def app(database_url, bootstrap_servers):
    """An app with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)


@pytest.mark.guarantee("S15", "S8")
def test_a_service_handles_records_inline_and_by_jobs(
    admin, database_url, bootstrap_servers, topic, wait_for
):
    name = topic(6)
    app = make_app(database_url, home=name, kafka_bootstrap_servers=bootstrap_servers)
    admin.execute("create table inline (key text, partition int)")
    by_job: list[tuple[str, str | None]] = []

    @app.job(group="key")
    def later(job: Job, key: str) -> None:
        by_job.append((job.origin, key))

    @app.job()
    def anyhow(job: Job) -> None:
        by_job.append((job.origin, None))

    @app.consumer(name, group=f"{name}-service")
    def handle(record, connection) -> None:
        connection.execute(
            "insert into inline values (%s, %s)", (record.key, record.partition)
        )
        later.enqueue(connection, key=record.key)
        anyhow.enqueue(connection)

    keys = [f"k{n}" for n in range(40)]
    produce(bootstrap_servers, name, [(key, {}) for key in keys])
    with running(app):
        wait_for(lambda: len(by_job) == 80, timeout=40, what="all jobs ran")
    inline = dict(admin.execute("select key, partition from inline").fetchall())
    # The producer, the group and the record all choose the same partition.
    assert inline == {key: choose_partition(key, 6) for key in keys}
    expected = sorted((f"{name}/{inline[key]}", key) for key in keys)
    assert sorted(o for o in by_job if o[1]) == expected
    assert sorted(o for o, key in by_job if key is None) == [o for o, _ in expected]


@pytest.mark.guarantee("S7")
def test_two_types_on_one_topic_reach_their_handlers(
    app, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    seen: list[tuple[str, int]] = []

    @app.consumer(name, group=f"{name}-g", type="order.created")
    def created(record, connection) -> None:
        seen.append(("created", record.value["n"]))

    @app.consumer(name, group=f"{name}-g", type="order.cancelled")
    def cancelled(record, connection) -> None:
        seen.append(("cancelled", record.value["n"]))

    for n, type_ in enumerate(["created", "cancelled", "created"]):
        headers = {"ce_type": f"order.{type_}"}
        produce(bootstrap_servers, name, [("k", {"n": n})], headers=headers)
    with running(app, "consumers"):
        wait_for(lambda: len(seen) == 3, timeout=30, what="all were handled")
    assert seen == [("created", 0), ("cancelled", 1), ("created", 2)]


@pytest.mark.guarantee("W76", "K9", "I25")
@pytest.mark.parametrize(
    "event",
    ["records.applied", pytest.param("records.committed", marks=pytest.mark.slow)],
)
def test_a_kill_between_any_two_statements_leaves_model_and_offset_agreeing(
    event,
    admin,
    app,
    bootstrap_servers,
    topic,
    start_process,
    database_url,
    read_offsets,
    wait_for,
):
    name = topic(2)
    admin.execute("create table model (key text primary key, version bigint, n int)")
    admin.execute("create table sums (partition int primary key, n bigint)")
    produce(bootstrap_servers, name, [(f"k{n % 10}", n) for n in range(200)])

    def agree() -> None:
        # A repeat or a gap would change this sum, which is read in one snapshot with
        # the offset.
        rows = admin.execute(
            "select o.partition, coalesce(o.next_offset, 0), coalesce(s.n, 0)"
            " from jobs_lib.offsets o left join sums s using (partition)"
            " where o.topic = %s",
            (name,),
        ).fetchall()
        for partition, following, total in rows:
            assert total == sum(by_partition[partition][:following])

    by_partition: dict[int, list[int]] = {0: [], 1: []}
    for n in range(200):
        by_partition[choose_partition(f"k{n % 10}", 2)].append(n)

    def start(**options):
        return start_process(
            "sums",
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            topic=name,
            **options,
        )

    for at in range(1, 6):
        worker = start(dies_at={event: at})
        assert worker.wait(timeout=60) == -9, worker.output
        agree()
    worker = start()
    wait_for(
        lambda: sum(read_offsets(name).values()) == 200,
        timeout=40,
        what=lambda: f"the rest is consumed\n{worker.output}",
    )
    agree()


@pytest.mark.guarantee("W76", "I24")
def test_a_blocks_changes_and_its_offset_are_written_in_one_transaction(
    app, admin, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    admin.execute("create table model (n int)")

    @app.consumer(name, group=f"{name}-g")
    def handle(record, connection) -> None:
        connection.execute("insert into model values (%s)", (record.value,))

    produce(bootstrap_servers, name, [("k", n) for n in range(3)])
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 3}, timeout=30, what="all is in")
    # The server's mark on each row shows the transaction that wrote it.
    last = admin.execute("select xmin::text from model where n = 2").fetchone()
    stored = admin.execute(
        "select xmin::text from jobs_lib.offsets where topic = %s", (name,)
    ).fetchone()
    assert last == stored


@pytest.mark.guarantee("I12", "FP16")
@pytest.mark.expects("origins.lost")
@pytest.mark.parametrize(
    "taken", ["owner = gen_random_uuid(), epoch = epoch + 1", "epoch = epoch + 1"]
)
def test_a_block_changes_nothing_when_its_partition_was_taken_meanwhile(
    app, admin, database, bootstrap_servers, topic, wait_for, taken
):
    name = topic(1)
    admin.execute("create table model (n int)")
    takes = iter([f"update jobs_lib.origins set {taken}"])

    @app.consumer(name, group=f"{name}-g")
    def handle(record, connection) -> None:
        connection.execute("insert into model values (%s)", (record.value,))
        # Another process takes over while this block is handled.
        if take := next(takes, None):
            admin.execute(take + " where origin = %s", (f"{name}/0",))

    produce(bootstrap_servers, name, [("k", 1)])
    with (
        heard("loop.failed", "records.applied", "records.committed") as events,
        running(app, "consumers"),
    ):
        wait_for(
            lambda: any(event == "loop.failed" for event, _ in events),
            timeout=30,
            what="the commit is refused",
        )
        seen = [event for event, _ in events]
        assert seen[: seen.index("loop.failed")] == ["records.applied"]
        failure = events[seen.index("loop.failed")][1]["error"]
        assert failure.startswith("FencedError: ")


@pytest.mark.guarantee("K9", "W69", "I28")
def test_a_failing_record_stops_its_partition_alone(
    app, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(2)
    fixed = threading.Event()
    handled: list[tuple[int, int]] = []

    @app.consumer(name, group=f"{name}-g")
    def handle(record, connection) -> None:
        if record.value == "bad" and not fixed.is_set():
            raise RuntimeError("cannot handle this")
        handled.append((record.partition, record.offset))

    bad, good = key_of(0, 2), key_of(1, 2)
    produce(bootstrap_servers, name, [(bad, n if n != 5 else "bad") for n in range(10)])
    produce(bootstrap_servers, name, [(good, n) for n in range(10)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(
            lambda: read_offsets(name) == {0: 5, 1: 10} and failed,
            timeout=30,
            what="all but what follows the bad record is in",
        )
        assert {fields["offset"] for _, fields in failed} == {5}
        fixed.set()
        wait_for(
            lambda: read_offsets(name) == {0: 10, 1: 10},
            timeout=30,
            what="the partition goes on",
        )
    assert sorted(set(handled)) == [(p, o) for p in (0, 1) for o in range(10)]


def test_a_record_is_retried_when_its_handler_returns_a_coroutine(
    app, admin, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    handled: list[int] = []

    async def handle_later(record) -> None:
        handled.append(record.offset)

    @app.consumer(name, group=f"{name}-g")
    def handle(record, connection):
        if len(failed) < 3:
            return handle_later(record)
        handled.append(record.offset)
        return None

    produce(bootstrap_servers, name, [("k", n) for n in range(3)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: len(handled) == 3, timeout=30, what="all are handled")
    assert handled == [0, 1, 2]
    assert f"the consumer of '{name}' returned a coroutine" in failed[-1][1]["error"]


@pytest.mark.guarantee("FK12")
def test_an_unreadable_record_waits_for_a_release_that_can_read_it(
    database_url, admin, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(2)
    admin.execute("create table handled (at bigserial, partition int, place bigint)")

    def make(value):
        app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)

        @app.consumer(name, group=f"{name}-g", value=value)
        def handle(record, connection) -> None:
            connection.execute(
                "insert into handled (partition, place) values (%s, %s)",
                (record.partition, record.offset),
            )

        return app

    bad, good = key_of(0, 2), key_of(1, 2)
    poison = b"\xff\x00 no JSON " + VALUE.encode()
    produce(bootstrap_servers, name, [(bad, n if n != 5 else poison) for n in range(9)])
    produce(bootstrap_servers, name, [(good, n) for n in range(9)])
    with heard("record.failed") as failed, running(make(int), "consumers"):
        wait_for(
            lambda: read_offsets(name) == {0: 5, 1: 9} and failed,
            timeout=30,
            what="all but what follows the poison is in",
        )
    assert {(fields["origin"], fields["offset"]) for _, fields in failed} == {
        (f"{name}/0", 5)
    }
    assert "cannot be read" in failed[0][1]["error"]
    # This release takes the bytes unchanged.
    with running(make(bytes), "consumers"):
        wait_for(
            lambda: read_offsets(name) == {0: 9, 1: 9},
            timeout=30,
            what="the partition goes on",
        )
    rows = admin.execute("select partition, place from handled order by at").fetchall()
    for partition in (0, 1):
        assert [o for p, o in rows if p == partition] == [*range(9)]


def test_a_read_model_follows_its_topic_and_never_goes_back(
    app, admin, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    admin.execute("create table board_rm (id text primary key, version bigint, n int)")

    @app.read_model(name, table="board_rm", key="id", group=f"{name}-rm")
    def board(record):
        return {"n": record.value["n"]}

    def send(key, n, version, value=None):
        value = {"n": n} if n is not None else None
        produce(
            bootstrap_servers,
            name,
            [(key, value)],
            headers={"ce_version": str(version)},
        )

    send("a", 1, 1)
    send("a", 3, 3)
    send("a", 2, 2)
    send("b", 1, 1)
    send("b", None, 2)
    send("c", 7, 7)
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 6}, timeout=30, what="all is in")
        # An older record in a later block changes nothing either.
        send("a", 1, 1)
        send("c", None, 3)
        wait_for(lambda: read_offsets(name) == {0: 8}, timeout=30, what="so is this")
    rows = admin.execute("select id, version, n from board_rm order by id").fetchall()
    assert rows == [("a", 3, 3), ("c", 7, 7)]


@pytest.mark.slow
@pytest.mark.guarantee("FK6")
def test_a_broker_that_is_down_is_waited_for(database_url, admin, connect, wait_for):
    with KafkaBroker.ephemeral() as broker:
        create_topic(
            AdminClient({"bootstrap.servers": broker.bootstrap_servers}), "own", 1, None
        )
        app = make_app(database_url, kafka_bootstrap_servers=broker.bootstrap_servers)
        handled: list[int] = []
        states = app.topic("own")

        @app.consumer("own", group="g")
        def handle(record, connection) -> None:
            handled.append(record.value)

        def send(n: int) -> None:
            with connect() as connection:
                states.send(connection, key="k", value=n)

        broker.kill()
        send(1)
        (shard,) = admin.execute("select shard from jobs_lib.outbox").fetchone()
        with heard("loop.failed") as failed:

            def come_up() -> None:
                wait_for(
                    lambda: any(fields["loop"] == "start" for _, fields in failed),
                    what="the service has noticed that no broker answers",
                )
                broker.start()

            starter = threading.Thread(target=come_up)
            starter.start()
            with running(app, "consumers", "relay"):
                starter.join()
                wait_for(
                    lambda: handled == [1], timeout=60, what="the row came through"
                )
                failed.clear()
                # The broker goes away again during the run, for longer than a
                # transaction may take.
                broker.kill()
                send(2)
                wait_for(
                    lambda: any(f["loop"] == f"relay shard {shard}" for _, f in failed),
                    timeout=30,
                    what="the relay has given up a block",
                )
                broker.start()
                wait_for(lambda: handled == [1, 2], timeout=60, what="the next one too")
