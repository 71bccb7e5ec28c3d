"""A process is not ready while a new read model lacks what its topic has."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from confluent_kafka import Producer

from jobs_lib.kafka.places import find_places
from jobs_lib.kafka.positions import KnownOffsets
from jobs_lib.service import filling as module
from jobs_lib.service.filling import Filling
from tests.support.apps import make_app, running
from tests.support.records import leave_offset, make_producer, read_committed
from tests.support.topics import make_anew


@pytest.fixture
def name(topic, bootstrap_servers):
    """A topic with ten states, and with a partition that has nothing but a marker."""
    name = topic(2, config={"cleanup.policy": "compact"})
    producer = Producer(
        {"bootstrap.servers": bootstrap_servers, "transactional.id": name}
    )
    producer.init_transactions(60)
    for partition, ends in ((0, "commit_transaction"), (1, "abort_transaction")):
        producer.begin_transaction()
        for n in range(10):
            producer.produce(name, b'{"n": 1}', f"k{n}", partition=partition)
        assert producer.flush(30) == 0
        getattr(producer, ends)(60)
    return name


@pytest.fixture
def declare(database_url, bootstrap_servers, admin, name):
    """A function that makes an app with a read model, whose function waits."""
    admin.execute("create table model (id text primary key, version bigint, n int)")

    def declare(may_go_on: threading.Event, after=()):
        app = make_app(
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            heartbeat_interval=0.2,
            gate_refresh=0.1,
        )

        @app.read_model(name, table="model", key="id", group=name, after=after)
        def row(record):
            may_go_on.wait(120)
            return record.value

        return app

    return declare


@pytest.mark.guarantee("W65")
def test_a_process_is_ready_once_a_new_read_model_has_reached_the_end(
    declare, name, gate, admin, wait_for
):
    with running(declare(gate), "consumers") as first:
        told = f"{name} is read for the first time: "
        wait_for(
            lambda: (
                (why := first.find_unready() or "").startswith(told)
                and why.endswith(" offsets left")
            ),
            timeout=60,
            what="it waits",
        )
        assert not first.is_ready
        gate.set()
        wait_for(lambda: first.is_ready, timeout=60, what="it has reached the end")
        assert admin.execute("select from model").rowcount == 10
        assert first.find_unready() is None


@pytest.mark.guarantee("W65")
def test_a_read_model_that_was_filled_once_is_new_no_more(
    declare, name, gate, bootstrap_servers, wait_for
):
    gate.set()
    with running(declare(gate), "consumers") as first:
        wait_for(lambda: first.is_ready, timeout=60, what="it has reached the end")
    held = threading.Event()
    producer = make_producer(bootstrap_servers)
    producer.produce(name, b'{"n": 2}', "k1", partition=0)
    assert producer.flush(30) == 0
    with running(declare(held), "consumers") as second:
        wait_for(lambda: second.is_ready, timeout=60, what="it is ready at once")
        assert find_places(second.settings, name, "end")[0] > 10
        # A function that outlives its process is refused, and says so.
        held.set()


@pytest.mark.guarantee("W65")
def test_the_ends_are_those_of_the_start_whenever_a_probe_asks_first(
    declare, name, gate, admin, bootstrap_servers, wait_for
):
    app = declare(gate)
    app.consumers.clear()

    @app.read_model(name, table="model", key="id", group=name)
    def row(record):
        if record.value["n"] == 2:
            gate.wait(120)
        return record.value

    def count() -> int:
        return int(admin.execute("select from model").rowcount)

    with running(app, "consumers") as service:
        wait_for(lambda: count() == 10, timeout=60, what="the first are in")
        # That a partition has no record left, nobody tells while the function waits.
        ends = find_places(service.settings, name, "end")
        wait_for(
            lambda: read_committed(bootstrap_servers, name, name) == ends,
            timeout=60,
            what="Kafka was told of the ends",
        )
        producer = make_producer(bootstrap_servers)
        producer.produce(name, b'{"n": 2}', "later", partition=0)
        assert producer.flush(30) == 0
        # The later record is held, and is none of those that count.
        wait_for(
            lambda: service.is_ready,
            timeout=60,
            what=lambda: f"it is ready: {service.find_unready()}",
        )
        assert count() == 10
        gate.set()


@pytest.mark.guarantee("W65")
def test_the_ends_of_a_topic_that_was_made_anew_keep_no_process_from_being_ready(
    declare, gate, name, kafka_admin, monkeypatch
):
    app = declare(gate)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    filling = Filling(app.settings, app.database(), app.consumers)
    assert "offsets left" in (filling.explain() or "")
    make_anew(kafka_admin, name, 1)
    assert filling.explain() is None


@pytest.mark.guarantee("W65")
def test_what_keeps_a_process_from_knowing_is_the_answer(declare, gate, name):
    app = declare(gate)
    away = app.settings.model_copy(update={"kafka_bootstrap_servers": "127.0.0.1:1"})
    filling = Filling(away, app.database(), app.consumers)
    assert "no Kafka broker at 127.0.0.1:1 answers" in (filling.explain() or "")


@pytest.mark.guarantee("W65")
def test_an_offset_that_kafka_has_of_an_earlier_database_does_not_count(
    declare, gate, name, bootstrap_servers
):
    app = declare(gate)
    ends = find_places(app.settings, name, "end")
    leave_offset(bootstrap_servers, name, name, ends[0])
    filling = Filling(app.settings, app.database(), app.consumers)
    left = sum(ends.values())
    assert (
        filling.explain() == f"{name} is read for the first time: {left} offsets left"
    )


@pytest.mark.guarantee("W65")
@pytest.mark.parametrize("stored", [3, None])
def test_an_offset_that_kafka_has_and_the_database_has_lost_does_not_count(
    declare, gate, name, admin, bootstrap_servers, stored
):
    app = declare(gate)
    ends = find_places(app.settings, name, "end")
    leave_offset(bootstrap_servers, name, name, ends[0])
    for partition, at in [(0, stored), (1, 0)]:
        admin.execute(
            "insert into jobs_lib.offsets"
            " (consumer_group, topic, partition, next_offset) values (%s, %s, %s, %s)",
            (name, name, partition, at),
        )
    left = ends[0] - (stored or 0) + ends[1]
    assert Filling(app.settings, app.database(), app.consumers).explain() == (
        f"{name} is read for the first time: {left} offsets left"
    )


@pytest.mark.guarantee("K20", "W65")
def test_what_a_closed_gate_holds_is_not_left_to_read(
    declare, name, gate, group, admin, wait_for
):
    gate.set()
    other = group()

    def count() -> int:
        return int(admin.execute("select from model").rowcount)

    def is_held(service) -> bool:
        (measures,) = service._find_measures()
        return [one.partition for one in measures.find_waits()] == [(name, 0)]

    # The group has committed nothing: its service is deployed later.
    with running(declare(gate, after=[(name, other.name)]), "consumers") as service:
        wait_for(lambda: is_held(service), timeout=60, what="its records wait")
        wait_for(lambda: service.is_ready, timeout=60, what="it is ready all the same")
        assert count() == 0
        # It is new no more, so it stays ready when the gate opens.
        other.commit_soon(name, {0: 10})
        wait_for(
            lambda: service.is_ready and count() == 10,
            timeout=60,
            what="it has read the rest",
        )


@pytest.mark.guarantee("W65")
def test_a_read_model_is_read_up_to_its_gate_before_it_is_filled(
    declare, name, gate, group, admin, bootstrap_servers, wait_for
):
    other = group()
    # Offset 10 is the marker of a transaction, and the record that waits follows it.
    other.commit_soon(name, {0: 11})
    producer = make_producer(bootstrap_servers)
    producer.produce(name, b'{"n": 2}', "later", partition=0)
    assert producer.flush(30) == 0
    told = f"{name} is read for the first time: "
    with running(declare(gate, after=[(name, other.name)]), "consumers") as service:
        consumer: Any = next(one.worker for one in service._owners if one.measures)
        wait_for(
            lambda: any(one.busy for one in consumer._partitions.values()),
            timeout=60,
            what="it reads what its gate lets through",
        )
        assert (service.find_unready() or "").startswith(told)
        gate.set()
        wait_for(lambda: service.is_ready, timeout=60, what="it has read it")
        assert admin.execute("select from model").rowcount == 10


@pytest.mark.guarantee("W65")
def test_records_count_while_nothing_is_known_of_the_groups(declare, name, gate, group):
    app = declare(gate, after=[(name, group().name)])
    filling = Filling(app.settings, app.database(), app.consumers)
    left = sum(find_places(app.settings, name, "end").values())
    told = f"{name} is read for the first time: {left} offsets left"
    assert filling.explain() == told


@pytest.mark.guarantee("K5", "W65")
@pytest.mark.parametrize(
    ("header", "committed", "is_left"),
    [("{first}/0/5", 5, False), ("{first}/0/5", 6, True), (None, 5, True)],
    ids=["behind", "passed", "unknown"],
)
def test_the_next_record_says_for_what_a_derived_partition_waits(
    declare, topic, name, gate, bootstrap_servers, monkeypatch, header, committed,
    is_left,
):  # fmt: skip
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    derived = topic(1, config={"cleanup.policy": "compact"})
    made_of = header and header.format(first=name)
    producer = make_producer(bootstrap_servers)
    producer.produce(
        derived, b'{"n": 1}', "k", headers=made_of and {"ce_derivedfrom": made_of}
    )
    assert producer.flush(30) == 0
    app = declare(gate)
    app.consumers.clear()
    app.read_model(
        derived, table="model", key="id", group=derived, after=[(name, "other")]
    )(lambda record: record.value)
    answer = KnownOffsets(2, {0: committed}, time.monotonic())
    filling = Filling(app.settings, app.database(), app.consumers, lambda _: answer)
    told = f"{derived} is read for the first time: 1 offsets left"
    # What has not moved since the last look may be held.
    assert filling.explain() == told
    assert filling.explain() == (told if is_left else None)


def test_handlers_keep_no_process_from_being_ready(declare, gate, name):
    app = declare(gate)
    app.consumers.clear()

    @app.consumer(name, group=name)
    def handle(record, conn):
        raise AssertionError

    assert Filling(app.settings, app.database(), app.consumers).explain() is None
