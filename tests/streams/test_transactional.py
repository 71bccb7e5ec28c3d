"""Events are made of records within Kafka's own transactions, each exactly once."""

from __future__ import annotations

import random
import string
import threading
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
from confluent_kafka import TopicPartition

from jobs_lib import ConfigurationError, Record, RefusedError
from jobs_lib.consuming import transactor
from jobs_lib.consuming.transactor import Transactor
from tests.support.apps import heard, running
from tests.support.processes.processors import COPY_STEPS, declare_copying
from tests.support.processes.publishers import MAY_PUBLISH
from tests.support.records import key_of, produce, read_committed, read_topic

pytestmark = pytest.mark.expects("fenced", "loop.failed")

QUICKLY = {"offered"}


@dataclass
class Order:
    """The value of a record."""

    numbers: list[int]


@pytest.fixture
def target(own_broker) -> str:
    """The topic of what is made."""
    return own_broker.create(2)


@pytest.fixture
def await_copies(read_log, target, wait_for):
    """A function that waits for so many copies, and returns what they say."""

    def wait(number: int) -> list[Any]:
        wait_for(
            lambda: len(read_log(target)) >= number,
            timeout=60,
            what=lambda: f"all are copied: {len(read_log(target))}",
        )
        return sorted(one.json["n"] for one in read_log(target))

    return wait


def send(broker, topic: str, numbers: range) -> None:
    """Produce numbers into both partitions."""
    events = [(key_of(n % 2, 2), {"n": n}) for n in numbers]
    produce(broker.bootstrap_servers, topic, events)


@pytest.mark.guarantee("T19")
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=() if step in QUICKLY else pytest.mark.slow)
        for step in COPY_STEPS
    ],
)
def test_each_event_is_there_once_wherever_the_process_dies(
    start_process, database_url, own_broker, make, name, target, await_copies, step
):
    send(own_broker, name, range(10))
    dying = start_process(
        "copies",
        database_url,
        kafka_bootstrap_servers=own_broker.bootstrap_servers,
        source=name,
        target=target,
        step=step,
        pod="copier",
    )
    dying.wait_for_line("dying around")
    dying.wait()
    app = make(pod="copier")
    declare_copying(app, name, target)
    with running(app, "consumers"):
        send(own_broker, name, range(10, 20))
        assert await_copies(20) == [*range(20)]
    # What was aborted is in the topic, and nobody sees it who reads what is committed.
    servers = own_broker.bootstrap_servers
    all_sent = read_topic(servers, target, isolation="read_uncommitted")
    assert (len(all_sent) > 20) == (step in ("sent", "offered"))


@pytest.mark.guarantee("T19")
def test_each_event_is_there_once_while_members_come_and_go(
    make, own_broker, name, target, await_copies, wait_for
):
    apps = [make(pod=f"pod-{n}") for n in range(2)]
    for app in apps:
        declare_copying(app, name, target)
    with running(apps[0], "consumers") as service:
        pulses = [one.name for one in service._find_pulses()]
        assert f"jobs_lib transactional {name}-copy" in pulses
        send(own_broker, name, range(50))
        with running(apps[1], "consumers"):
            send(own_broker, name, range(50, 100))
            await_copies(100)
            send(own_broker, name, range(100, 150))
        send(own_broker, name, range(150, 200))
        assert await_copies(200) == [*range(200)]
    group = f"{name}-copy"
    servers = own_broker.bootstrap_servers
    # The marker of the last commit may come to the group after it came to the target.
    wait_for(
        lambda: read_committed(servers, group, name) == {0: 100, 1: 100},
        timeout=30,
        what=lambda: f"all is committed: {read_committed(servers, group, name)}",
    )


@pytest.mark.slow
@pytest.mark.guarantee("T19")
def test_a_process_that_stood_still_commits_nothing_more(
    start_process, database_url, make, own_broker, admin, name, target, await_copies,
    wait_for,
):  # fmt: skip
    send(own_broker, name, range(10))
    frozen = start_process(
        "copies",
        database_url,
        kafka_bootstrap_servers=own_broker.bootstrap_servers,
        source=name,
        target=target,
        pod="frozen",
        stands_still=True,
    )
    frozen.wait_for_line("inside")
    frozen.pause()
    app = make(pod="other")
    declare_copying(app, name, target)
    with running(app, "consumers"):
        assert await_copies(10) == [*range(10)]
        admin.execute(MAY_PUBLISH)
        frozen.resume()
        wait_for(
            lambda: any("loop.failed" in line for line in frozen.errors),
            timeout=60,
            what=lambda: f"its commit is refused\n{frozen.output}",
        )
        send(own_broker, name, range(10, 20))
        assert await_copies(20) == [*range(20)]


@pytest.mark.guarantee("T19")
def test_a_record_that_fails_holds_its_own_partition_and_commits_those_before(
    make, own_broker, name, target, await_copies, wait_for
):
    app = make()
    stream = app.stream(target)
    may_go_on = threading.Event()
    wrong: dict[int, Any] = {4: "an error", 6: [1], 8: "too large"}

    @app.transactional(name, group=f"{name}-copy")
    def copy(record):
        n = record.value["n"]
        if may_go_on.is_set() or n not in wrong:
            return [stream.event(record.key, {"n": n})]
        if n == 8:
            large = {"n": n, "more": "x" * 1_100_000}
            return stream.event(record.key, large)
        if n == 6:
            return wrong[n]
        raise ValueError("a fault in the function")

    with heard("record.failed") as failed, running(app, "consumers"):
        send(own_broker, name, range(10))
        # All of the other partition, and those before the record that fails.
        assert await_copies(7) == [0, 1, 2, 3, 5, 7, 9]
        wait_for(lambda: len(failed) > 1, timeout=60, what="it is tried again")
        told = failed[0][1]
        assert (told["origin"], told["offset"]) == (f"{name}/0", 2)
        assert "a fault in the function" in told["error"]
        del wrong[4]
        wait_for(
            lambda: failed[-1][1]["offset"] == 3, timeout=60, what="the next one fails"
        )
        assert "stream.event(key, value)" in failed[-1][1]["error"]
        del wrong[6]
        wait_for(
            lambda: failed[-1][1]["offset"] == 4, timeout=60, what="the next one fails"
        )
        may_go_on.set()
        assert await_copies(10) == [*range(10)]


@pytest.mark.guarantee("T19")
def test_a_partition_that_leaves_and_comes_again_while_it_waits_goes_on(
    make, own_broker, name, target, await_copies, monkeypatch
):
    # No retry comes before the rebalance.
    monkeypatch.setattr(transactor, "RECONNECT", Mock(delay=lambda _: 60.0))
    resume = Transactor._resume

    def rebalance(self, consumer) -> None:
        resume(self, consumer)
        places = [TopicPartition(*one) for one in self._held]
        if places:
            self._on_revoke(consumer, places)
            consumer.incremental_unassign(places)
            self._on_assign(consumer, places)

    monkeypatch.setattr(Transactor, "_resume", rebalance)
    app = make()
    stream = app.stream(target)
    failing = {4}

    @app.transactional(name, group=f"{name}-copy")
    def copy(record):
        if record.value["n"] in failing:
            failing.clear()
            raise ValueError("a fault in the function")
        return stream.event(record.key, record.value)

    with heard("record.failed") as failed, running(app, "consumers"):
        send(own_broker, name, range(10))
        assert await_copies(10) == [*range(10)]
    assert len(failed) == 1


@pytest.mark.guarantee("T19")
def test_an_event_that_kafka_refuses_is_aborted_with_its_block(
    make, own_broker, name, await_copies, wait_for, target, read_log
):
    small = own_broker.create(1, {"max.message.bytes": "500"})
    app = make()
    copies, others = app.stream(target), app.stream(small)
    may_go_on = threading.Event()

    @app.transactional(name, group=f"{name}-copy")
    def copy(record):
        n = record.value["n"]
        size = 5_000 if n == 4 and not may_go_on.is_set() else 1
        text = "".join(random.choices(string.ascii_letters, k=size))
        return [
            copies.event(record.key, {"n": n}),
            others.event(record.key, {"text": text}),
        ]

    with heard("record.failed") as failed, running(app, "consumers"):
        send(own_broker, name, range(10))
        wait_for(lambda: len(failed) > 2, timeout=30, what="it is tried again")
        assert "MSG_SIZE_TOO_LARGE" in failed[-1][1]["error"]
        assert await_copies(7) == [0, 1, 2, 3, 5, 7, 9]
        may_go_on.set()
        assert await_copies(10) == [*range(10)]
    assert len(read_log(small)) == 10


@pytest.mark.guarantee("T19")
def test_a_function_gets_typed_records_and_returns_no_event_one_or_several(
    make, own_broker, name, target, await_copies
):
    def refuse(*_: object) -> NoReturn:
        raise RefusedError("nobody asks")

    app = make()
    stream = app.stream(target, check=refuse, current=refuse)

    @app.transactional(name, group=f"{name}-copy", value=Order, key_type=int)
    def copy(record: Record[Order, int]) -> Any:
        order, key = record.value, record.key
        events = [stream.event(str(key), {"n": n}) for n in order.numbers]
        if key == 0:
            return None
        return events[0] if key == 1 else tuple(events)

    orders = [("0", [7]), ("1", [1]), ("2", [2, 3]), ("3", []), ("4", [4])]
    events = [(key, {"numbers": numbers}) for key, numbers in orders]
    produce(own_broker.bootstrap_servers, name, events)
    with running(app, "consumers"):
        assert await_copies(4) == [1, 2, 3, 4]


def test_what_cannot_be_transactional_is_refused(make):
    app = make()
    with pytest.raises(ConfigurationError, match="is async"):

        @app.transactional("a", group="g")
        async def wait(record): ...

    with pytest.raises(ConfigurationError, match="called with record"):

        @app.transactional("a", group="g")
        def take(record, conn): ...

    @app.transactional("a", group="g")
    def copy(record): ...

    app.names_in_kafka()

    @app.consumer("b", group="g")
    def handle(record, conn): ...

    with pytest.raises(ConfigurationError, match="a group of its own"):
        app.names_in_kafka()
