"""How long a function that makes events may take, and where it goes on."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any
from uuid import UUID, uuid4

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

from jobs_lib.consuming.transactor import Transactor
from jobs_lib.kafka.topic_ids import TopicIds
from tests.support.apps import heard, running
from tests.support.processes.processors import declare_copying
from tests.support.records import key_of, produce, read_committed
from tests.support.topics import make_anew

pytestmark = pytest.mark.expects("fenced", "loop.failed")

LIMIT = {"max.poll.interval.ms": "6000"}
"""How long a call may take; by default it is five minutes."""


@pytest.fixture
def target(own_broker) -> str:
    """The topic of what is made."""
    return own_broker.create(2)


@pytest.fixture
def make_transactor(make, name, monkeypatch):
    """A function that runs a function, which first meets records of both partitions."""
    made: list[Transactor] = []

    def make_one(function, **settings) -> tuple[Transactor, list[str]]:
        app = make(**settings)
        app.transactional(name, group=f"{name}-copy")(function)
        (declared,) = app.transactionals
        transactor = Transactor(app.settings, declared, uuid4(), "pod")
        fetch = transactor._fetch
        polls: list[str] = []

        def fetch_both(consumer) -> None:
            while True:
                fetch(consumer)
                if polls or len(transactor._fetched) == 2:
                    break
            polls.append("poll")

        monkeypatch.setattr(transactor, "_fetch", fetch_both)
        made.append(transactor)
        return transactor, polls

    yield make_one
    for transactor in made:
        transactor.stop()


def send(broker, topic: str, numbers: range) -> None:
    """Produce numbers into both partitions."""
    events: list[tuple[str | None, Any]] = [
        (key_of(n % 2, 2), {"n": n}) for n in numbers
    ]
    produce(broker.bootstrap_servers, topic, events)


@pytest.mark.guarantee("T19")
@pytest.mark.parametrize(
    "protocol", ["classic", pytest.param("consumer", marks=pytest.mark.slow)]
)
def test_a_call_that_takes_too_long_commits_nothing_and_others_take_over(
    make, own_broker, name, target, read_log, wait_for, protocol
):
    may_end = threading.Event()
    called: list[str] = []
    settings = {"kafka": LIMIT, "group_protocol": protocol}
    apps = [make(pod=f"pod-{n}", **settings) for n in range(2)]

    def declare(app):
        stream = app.stream(target)

        @app.transactional(name, group=f"{name}-copy")
        def copy(record):
            n = record.value["n"]
            if n == 0:
                called.append(app.settings.pod)
                if len(called) == 1:
                    may_end.wait(120)
            return stream.event(record.key, {"n": n, "pod": app.settings.pod})

    def tell(what: str) -> str:
        made = [(one.partition, one.json) for one in read_log(target)]
        places = read_committed(servers, group, name)
        return f"{what}: {called=}, {failed=}, {places=}, {made=}"

    for app in apps:
        declare(app)
    send(own_broker, name, range(10))
    servers, group = own_broker.bootstrap_servers, f"{name}-copy"
    with heard("loop.failed") as failed, running(apps[0], "consumers"):
        wait_for(lambda: called, timeout=30, what=lambda: tell("it is called"))
        with running(apps[1], "consumers"):
            wait_for(
                lambda: len(read_log(target)) == 10,
                timeout=60,
                what=lambda: tell("the other one makes all"),
            )
            may_end.set()
            wait_for(lambda: failed, timeout=30, what="its commit is refused")
            send(own_broker, name, range(10, 20))
            wait_for(
                lambda: len(read_log(target)) >= 20,
                timeout=60,
                what=lambda: tell("all are made"),
            )
    made = sorted((one.json["n"], one.json["pod"]) for one in read_log(target))
    assert [n for n, _ in made] == [*range(20)]
    assert {pod for n, pod in made if n % 2 == 0 and n < 10} == {"pod-1"}
    # The group's marker may come after that of the topic.
    wait_for(
        lambda: read_committed(servers, group, name) == {0: 10, 1: 10},
        what="the offsets are committed",
    )


@pytest.mark.guarantee("T19")
def test_a_member_polls_between_slow_calls_however_many_partitions_it_has(
    make_transactor, own_broker, name, wait_for
):
    steps: list[str]
    called: list[int] = []

    def note(record) -> None:
        called.append(record.value["n"])
        steps.append("call")

    send(own_broker, name, range(10))
    # The time of a block is over after each call.
    transactor, steps = make_transactor(note, consumer_block_seconds=1e-6)
    transactor.start()
    wait_for(lambda: len(called) == 10, timeout=60, what=lambda: f"all: {called}")
    assert ("call", "call") not in pairwise(steps)
    # Partitions take turns, and each keeps its order.
    assert {n % 2 for n in called[:2]} == {0, 1}
    assert [n for n in called if n % 2] == [1, 3, 5, 7, 9]
    assert [n for n in called if not n % 2] == [0, 2, 4, 6, 8]


@pytest.mark.guarantee("T19")
def test_a_stop_ends_with_the_call_that_runs_and_commits_what_is_done(
    make_transactor, own_broker, name, wait_for
):
    called: list[int] = []

    def end(record) -> None:
        called.append(record.partition)
        threading.Thread(target=transactor.stop).start()
        assert transactor._loop.stopping.wait(30)

    send(own_broker, name, range(10))
    transactor, _ = make_transactor(end, consumer_block_seconds=60)
    transactor.start()
    transactor._loop._thread.join(60)
    (partition,) = called
    servers, group = own_broker.bootstrap_servers, f"{name}-copy"
    wait_for(
        lambda: (read_committed(servers, group, name) or {}).get(partition),
        what="its offset is committed",
    )
    assert (read_committed(servers, group, name) or {}).get(partition) == 1


@pytest.mark.slow
@pytest.mark.guarantee("T19")
def test_a_process_of_another_name_goes_on_behind_an_open_transaction(
    start_process, database_url, own_broker, make, name, target, read_log, wait_for
):
    send(own_broker, name, range(10))
    dying = start_process(
        "copies",
        database_url,
        kafka_bootstrap_servers=own_broker.bootstrap_servers,
        source=name,
        target=target,
        step="offered",
        pod="copier",
    )
    dying.wait_for_line("dying around")
    dying.wait()
    app = make(pod="other")
    declare_copying(app, name, target)
    with running(app, "consumers"):
        wait_for(lambda: len(read_log(target)) >= 10, timeout=90, what="all are made")
    assert sorted(one.json["n"] for one in read_log(target)) == [*range(10)]


@pytest.mark.guarantee("T19")
def test_a_function_whose_next_record_is_gone_stands_still_until_its_offset_is_set(
    make, own_broker, name, target, read_log, wait_for
):
    group, admin = f"{name}-copy", own_broker.admin

    def run() -> Any:
        app = make()
        declare_copying(app, name, target)
        return running(app, "consumers")

    def read() -> list[int]:
        return sorted(one.json["n"] for one in read_log(target))

    send(own_broker, name, range(4))
    with run():
        wait_for(lambda: len(read()) == 4, timeout=30, what="the first ones are made")
    send(own_broker, name, range(4, 10))
    upto = [TopicPartition(name, n, 3) for n in range(2)]
    for future in admin.delete_records(upto).values():
        future.result()
    with heard("loop.failed") as failed, run():
        wait_for(lambda: len(failed) > 1, timeout=30, what="it says so again")
        assert "OffsetError" in failed[0][1]["error"]
        assert f"at offset 2 of {name}/" in failed[0][1]["error"]
        assert "set the group's offset in Kafka" in failed[0][1]["error"]
        assert read() == [0, 1, 2, 3]
    # As Kafka's own tools do it.
    places = [ConsumerGroupTopicPartitions(group, upto)]
    for future in admin.alter_consumer_group_offsets(places).values():
        future.result()
    with run():
        wait_for(lambda: len(read()) == 8, timeout=30, what="the others are made")
    assert read() == [0, 1, 2, 3, 6, 7, 8, 9]


@pytest.mark.guarantee("FK20")
def test_a_function_begins_with_the_oldest_record_of_a_topic_made_anew(
    make, own_broker, target, read_log, wait_for
):
    name = own_broker.create(1)
    servers, app = own_broker.bootstrap_servers, make()
    stream = app.stream(target)
    is_called, may_fail = threading.Event(), threading.Event()

    @app.transactional(name, group=f"{name}-copy")
    def copy(record) -> Any:
        if record.value["n"] == 3:
            is_called.set()
            may_fail.wait(60)
            raise ValueError("it always fails")
        return stream.event(record.key, record.value)

    def read() -> list[int]:
        return sorted(one.json["n"] for one in read_log(target))

    produce(servers, name, [("k", {"n": n}) for n in range(10)])
    with running(app, "consumers"):
        assert is_called.wait(60)
        make_anew(own_broker.admin, name, 1)
        # There is a record at the offset that comes next.
        produce(servers, name, [("k", {"n": 100 + n}) for n in range(10)])
        # The partition is held before the function can read on.
        may_fail.set()
        wait_for(
            lambda: 109 in read(), timeout=60, what=lambda: f"the last of {read()}"
        )
    assert read() == [*range(3), *range(100, 110)]


@pytest.mark.guarantee("FK20")
def test_a_topic_made_anew_that_a_function_goes_on_reading_is_noticed(
    make, own_broker, target, read_log, wait_for, monkeypatch
):
    name = own_broker.create(1)

    def run() -> Any:
        app = make()
        declare_copying(app, name, target)
        return running(app, "consumers")

    def await_made(count: int) -> None:
        wait_for(lambda: len(read_log(target)) == count, timeout=60, what="all")

    def become_another(id_: UUID) -> None:
        monkeypatch.setattr(TopicIds, "read", lambda self, topics: {name: id_})
        monkeypatch.setattr(TopicIds, "poll", lambda self: {name: id_})

    produce(own_broker.bootstrap_servers, name, [("k", {"n": n}) for n in range(4)])
    with heard("topic.replaced") as told, run():
        await_made(4)
        become_another(uuid4())
        # All records are of the new topic.
        await_made(8)
        assert told[0][1]["next_offset"] == 4
        assert told[0][1]["origin"] == f"{name}/0"
    # Nobody runs meanwhile, and Kafka keeps the offset of the one before.
    with run():
        produce(own_broker.bootstrap_servers, name, [("k", {"n": 4})])
        await_made(9)
    become_another(uuid4())
    with heard("topic.replaced") as told, run():
        await_made(14)
        assert told[0][1]["next_offset"] == 5
