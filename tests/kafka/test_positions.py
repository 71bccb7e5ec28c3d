"""What Kafka says of topics and groups, in one map for all of a process that ask."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from confluent_kafka import (
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

from jobs_lib.errors import AccessError, ConfigurationError
from jobs_lib.kafka import position_clients
from jobs_lib.kafka import positions as module
from jobs_lib.kafka.client import make_consumer
from jobs_lib.kafka.positions import Positions
from jobs_lib.settings import load_settings
from tests.support.apps import heard
from tests.support.groups import Group
from tests.support.records import make_producer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib.kafka.positions import KnownOffsets

OLD = 3_600.0
"""Seconds: any answer of a test is younger."""
KILLS = 10


@pytest.fixture
def make(bootstrap_servers, monkeypatch) -> Iterator[Callable[..., Positions]]:
    """A function that makes a map, which is stopped at the end."""
    made: list[Positions] = []
    # A busy machine does not make a broker silent.
    monkeypatch.setattr(module, "_QUICK_SECONDS", 30.0)
    monkeypatch.setattr(module, "_NEXT_SECONDS", 30.0)

    def make(servers: str = bootstrap_servers, **options: Any) -> Positions:
        options = {"interval": 0.05, "timeout": 30.0, **options}
        settings = load_settings(kafka_bootstrap_servers=servers)
        made.append(Positions(settings, **options))
        return made[-1]

    yield make
    # What a thread tells on a busy machine belongs to this test, and not to the next.
    monkeypatch.setattr(module, "_LAST_SECONDS", 20.0)
    for one in made:
        one.stop()


@pytest.fixture
def positions(make) -> Positions:
    """A running map."""
    made: Positions = make()
    made.start()
    return made


@pytest.fixture
def get(wait_for) -> Callable[[Callable[[], KnownOffsets | None]], KnownOffsets]:
    """A function that asks until there is an answer."""

    def get(ask: Callable[[], KnownOffsets | None]) -> KnownOffsets:
        answer: KnownOffsets = wait_for(ask, timeout=60, what="it is known")
        return answer

    return get


@pytest.fixture
def fill(bootstrap_servers) -> Callable[..., None]:
    """A function that produces this many records to each partition."""

    def fill(name: str, *counts: int, servers: str = bootstrap_servers) -> None:
        producer = make_producer(servers)
        for partition, count in enumerate(counts):
            for _ in range(count):
                producer.produce(name, b"v", partition=partition)
        assert producer.flush(30) == 0

    return fill


def commit(servers: str, name: str, topic: str, offsets: dict[int, int]) -> None:
    """Commit offsets of a group that has no members, by partition."""
    group = Group(servers, name)
    try:
        group.commit_soon(topic, offsets)
    finally:
        group.close()


def test_starts_ends_and_offsets_of_groups_are_known(
    positions, topic, fill, kafka_admin, bootstrap_servers, get
):
    name, group = topic(3), f"g-{uuid4().hex[:8]}"
    fill(name, 5, 0, 7)
    for deleted in kafka_admin.delete_records([TopicPartition(name, 2, 4)]).values():
        deleted.result()
    commit(bootstrap_servers, group, name, {0: 3})
    before = time.monotonic()
    ends = get(lambda: positions.ask_ends(name))
    starts = get(lambda: positions.ask_starts(name))
    committed = get(lambda: positions.ask_committed(group, name))
    assert (ends.partitions, ends.offsets) == (3, {0: 5, 1: 0, 2: 7})
    assert ends.is_complete
    assert starts.offsets == {0: 0, 1: 0, 2: 4}
    assert (committed.partitions, committed.offsets) == (3, {0: 3})
    assert not committed.is_complete
    for one in (ends, starts, committed):
        assert before <= one.read_at
        assert 0 <= one.age <= time.monotonic() - before


def test_an_offset_above_the_end_is_told_without_a_break(
    make, topic, fill, bootstrap_servers, wait_for
):
    name, group = topic(1), f"g-{uuid4().hex[:8]}"
    fill(name, 3)
    commit(bootstrap_servers, group, name, {0: 1_000})
    told: list[dict[int, int] | None] = []
    asked = make()

    def note() -> None:
        handled = asked.ask_handled(group, name, within=OLD)
        if handled or told:
            told.append(handled and dict(handled.above))

    asked.listen(note)
    asked.start()
    note()  # The first question.
    # One answer has the group's offsets, and the next one has the ends.
    wait_for(lambda: len(told) >= 20, timeout=60, what="it is told again and again")
    assert all(one == {0: 1_000} for one in told), told


@pytest.mark.guarantee("K4")
def test_it_joins_no_group(positions, topic, bootstrap_servers, kafka_admin, get):
    name, group = topic(1), f"g-{uuid4().hex[:8]}"
    assert get(lambda: positions.ask_committed(group, name)).offsets == {}
    described = kafka_admin.describe_consumer_groups([group])[group].result()
    assert described.members == []
    groups = kafka_admin.list_consumer_groups().result().valid
    assert group not in {one.group_id for one in groups}


def test_nothing_is_known_of_a_topic_that_does_not_exist(
    positions, topic, fill, kafka_admin, get
):
    name, there = f"later-{uuid4().hex[:8]}", topic(1)
    assert positions.ask_ends(name) is None
    # Once this one is answered for the second time, the other one was asked for.
    first = get(lambda: positions.ask_ends(there)).read_at
    get(lambda: (one := positions.ask_ends(there)) and one.read_at > first and one)
    assert positions.ask_ends(name) is None


@pytest.mark.expects("loop.failed")
def test_a_topic_that_goes_is_not_known_any_more_and_a_new_one_is(
    positions, topic, fill, kafka_admin, get, wait_for
):
    name = topic(1)
    fill(name, 4)
    assert get(lambda: positions.ask_ends(name)).offsets == {0: 4}
    for deleted in kafka_admin.delete_topics([name]).values():
        deleted.result()
    wait_for(
        lambda: positions.ask_ends(name, within=OLD) is None,
        timeout=60,
        what="nothing is known of it",
    )
    new = topic(2)
    assert get(lambda: positions.ask_ends(new)).offsets == {0: 0, 1: 0}


def test_new_partitions_are_found(positions, topic, fill, kafka_admin, get):
    name = topic(2)
    fill(name, 1, 2)
    assert get(lambda: positions.ask_ends(name)).partitions == 2
    grown = kafka_admin.create_partitions([NewPartitions(name, 4)])
    for future in grown.values():
        future.result()
    ends = {0: 1, 1: 2, 2: 0, 3: 0}
    # Nothing is known of the topic if the last answer is too old.
    found = get(
        lambda: (one := positions.ask_ends(name)) and one.offsets == ends and one
    )
    assert found.partitions == 4


def test_an_open_transaction_is_behind_the_end_and_before_the_high_watermark(
    positions, topic, fill, bootstrap_servers, get
):
    name = topic(1)
    fill(name, 3)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "transactional.id": f"open-{uuid4().hex[:8]}",
        }
    )
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(name, b"v", partition=0)
    assert producer.flush(30) == 0
    assert get(lambda: positions.ask_ends(name)).offsets == {0: 3}
    assert get(lambda: positions.ask_high(name)).offsets == {0: 4}
    producer.commit_transaction(60)
    # The marker of the commit comes some time later.
    get(lambda: (one := positions.ask_ends(name)) and one.offsets == {0: 5})


def test_an_answer_that_is_too_old_is_none(positions, topic, get):
    name = topic(1)
    get(lambda: positions.ask_ends(name))
    assert positions.ask_ends(name, within=0) is None
    assert positions.ask_ends(name, within=OLD) is not None


@pytest.mark.guarantee("FK17", "K4")
def test_many_questions_cost_one_request_of_a_kind_and_never_come_too_often(
    make, topic, monkeypatch, wait_for
):
    names, groups = [topic(20), topic(20)], ["g0", "g1", "g2"]
    interval = 3600.0
    positions = make(interval=interval)
    requests: list[tuple[str, str, int]] = []
    rounds: list[float] = []
    waits: list[float] = []
    gate = threading.Event()
    kafka = positions._kafka
    find = kafka.find_partitions

    def count_read(read, kind, group, topics, *more):
        requests.append((kind, group, sum(map(len, topics.values()))))
        return read(kind, group, topics, *more)

    def count_find(topics):
        rounds.append(time.monotonic())
        return find(topics)

    def wait(seconds: float | None = None) -> bool:
        if seconds is not None and seconds > 0:
            waits.append(seconds)
            gate.wait(60)
        return False

    def ask_all() -> bool:
        asked = [positions.ask_ends(name) for name in names]
        asked += [positions.ask_starts(name) for name in names]
        for group in groups:
            asked += [positions.ask_committed(group, name) for name in names]
        return None not in asked

    for clients in (kafka, positions._patient):
        monkeypatch.setattr(clients, "read", partial(count_read, clients.read))
    monkeypatch.setattr(kafka, "find_partitions", count_find)
    monkeypatch.setattr(positions._loop.stopping, "wait", wait)
    assert not ask_all()
    positions.start()
    wait_for(lambda: len(requests) == 5, timeout=60, what="the first round")
    everything = [("committed", one, 40) for one in groups]
    everything += [("end", "", 40), ("start", "", 40)]
    assert sorted(requests) == everything
    askers = [threading.Thread(target=ask_all) for _ in range(8)]
    for one in askers:
        one.start()
    for one in askers:
        one.join()
    wait_for(ask_all, timeout=60, what="all is known")
    # It waits for the rest of the interval, whoever asks meanwhile.
    wait_for(lambda: waits, timeout=60, what="it waits")
    assert interval / 2 < waits[0] <= interval
    assert len(rounds) == 1
    gate.set()
    wait_for(lambda: len(requests) >= 10, timeout=60, what="the second round")
    assert sorted(requests[5:10]) == everything


def test_offsets_and_ends_to_compare_are_asked_for_in_one_round(make, monkeypatch):
    positions = make()
    woken: list[set[str]] = []

    def wake() -> None:
        woken.append({one.kind for one in positions._asked})

    monkeypatch.setattr(positions._wanted, "set", wake)
    assert positions.ask_handled("g", "t") is None
    assert woken == [{"committed", "high"}]


def test_nobody_asks_and_nothing_is_sent(make, monkeypatch, topic, get, wait_for):
    closed: list[str] = []
    opened: list[str] = []

    def make_noted(settings, group, *args, **options):
        opened.append(group)
        consumer = make_consumer(settings, group, *args, **options)

        class Noted:
            committed, poll = consumer.committed, consumer.poll
            offsets_for_times = consumer.offsets_for_times

            def close(self) -> None:
                closed.append(group)
                consumer.close()

        return Noted()

    monkeypatch.setattr(position_clients, "make_consumer", make_noted)
    positions, name = make(), topic(1)
    positions.start()
    get(lambda: positions.ask_committed("first", name))
    assert opened == ["first"]
    # A client that nobody needs is closed by a later round.
    monkeypatch.setattr(position_clients, "IDLE", 0.0)
    wait_for(
        lambda: positions.ask_committed("second", name) and "first" in closed,
        timeout=60,
        what="the client of the first group is closed",
    )
    positions.stop()
    # It waits a second for its thread, and not longer.
    wait_for(
        lambda: sorted(closed) == sorted(opened),
        timeout=60,
        what=lambda: f"all clients are closed: {opened}, {closed}",
    )


def test_a_partition_without_a_leader_is_not_known_and_the_others_are(
    make, topic, fill, monkeypatch, get
):
    name, positions = topic(3), make()
    fill(name, 1, 2, 3)
    find = positions._kafka.find_partitions

    def lose_one(topics):
        found, failures = find(topics)
        return {one: {**of_one, 1: False} for one, of_one in found.items()}, failures

    monkeypatch.setattr(positions._kafka, "find_partitions", lose_one)
    positions.start()
    found = get(lambda: positions.ask_ends(name))
    assert (found.partitions, found.offsets) == (3, {0: 1, 2: 3})
    assert not found.is_complete


def test_a_topic_that_goes_between_two_requests_is_no_failure(
    make, topic, monkeypatch, get, wait_for
):
    name, positions = topic(1), make()
    kafka, find = positions._kafka, positions._kafka.find_partitions
    monkeypatch.setattr(position_clients, "_PAUSE", 0.02)

    def find_more(topics):
        found, failures = find(topics)
        return {"gone": {0: True}, **found}, failures

    monkeypatch.setattr(kafka, "find_partitions", find_more)
    # The broker is asked, as if it had the topic.
    answer = KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
    asked = Mock(side_effect=answer)
    lost = Mock(offsets_for_times=asked, poll=Mock(return_value=None))
    of_group = kafka._get

    def get_client(group, **options):
        return of_group(group, **options) if group == "g" else lost

    monkeypatch.setattr(kafka, "_get", get_client)
    positions.ask_ends("gone")
    positions.ask_committed("g", name)
    positions.start()
    get(lambda: positions.ask_committed("g", name))
    wait_for(
        lambda: positions.ask_ends("gone") is None and asked.call_count > 20,
        timeout=60,
        what="it was asked in several rounds",
    )


@pytest.mark.parametrize("name", ["", "a b", "a/0", "a" * 250])
def test_a_topic_that_no_broker_can_have_is_refused(make, name):
    with pytest.raises(ConfigurationError, match="no topic can be called"):
        make().ask_ends(name)


def test_a_group_without_a_name_is_refused(make):
    with pytest.raises(ConfigurationError, match="name the group"):
        make().ask_committed("", "t")


def test_an_error_of_one_partition_leaves_it_out():
    places: Any = [
        SimpleNamespace(topic="t", partition=0, offset=5, error=None),
        SimpleNamespace(topic="t", partition=1, offset=5, error="refused"),
    ]
    assert position_clients._sort(places) == {"t": {0: 5}}


@pytest.mark.expects("loop.failed")
def test_what_is_refused_keeps_no_others_back(make, topic, monkeypatch, get, wait_for):
    name, positions = topic(1), make()
    find = positions._kafka.find_partitions

    def hide(topics):
        found, failures = find(topics - {"hidden"})
        return found, failures | {"hidden": AccessError("hidden")}

    def refuse(read, kind, group, *more):
        if group == "a-secret":
            raise AccessError("no")
        return read(kind, group, *more)

    for clients in (positions._kafka, positions._patient):
        monkeypatch.setattr(clients, "read", partial(refuse, clients.read))
    monkeypatch.setattr(positions._kafka, "find_partitions", hide)
    positions.ask_ends("hidden")
    positions.ask_committed("a-secret", name)
    positions.ask_committed("b", name)
    positions.ask_ends(name)
    with heard("loop.failed") as failed:
        positions.start()
        get(lambda: positions.ask_committed("b", name))
        get(lambda: positions.ask_ends(name))
        assert positions.ask_committed("a-secret", name) is None
        assert positions.ask_ends("hidden") is None
        wait_for(
            lambda: (
                {fields["error"] for _, fields in failed}
                == {"AccessError: no", "AccessError: hidden"}
            ),
            timeout=60,
            what=lambda: f"both are told: {failed}",
        )


@pytest.mark.expects("loop.failed")
def test_while_no_broker_answers_everybody_gets_the_last_answer(
    own_broker, make, fill, get, wait_for
):
    name = own_broker.create(2)
    fill(name, 1, 2, servers=own_broker.bootstrap_servers)
    positions = make(own_broker.bootstrap_servers, timeout=0.5)
    positions.start()
    before = get(lambda: positions.ask_ends(name))
    with heard("loop.failed") as failed:
        with own_broker.down():
            wait_for(
                lambda: positions.ask_ends(name, within=OLD) and failed,
                timeout=60,
                what="it has noticed",
            )
            last = positions.ask_ends(name, within=OLD)
            assert last.offsets == before.offsets == {0: 1, 1: 2}
            age = last.age
            assert positions.ask_ends(name, within=OLD).age >= age
            assert positions.ask_ends(name, within=age / 2) is None
        # A broker that comes back has not found all of its partitions at once.
        back = get(
            lambda: (
                (one := positions.ask_ends(name))
                and one.read_at > last.read_at
                and one.is_complete
                and one
            )
        )
    assert back.offsets == before.offsets
    assert "UnavailableError" in failed[0][1]["error"]


@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize(
    "code", ["_DESTROY_BROKER", "_FAIL", "LEADER_NOT_AVAILABLE", "_TRANSPORT"]
)
def test_a_topic_that_is_not_described_once_keeps_its_last_answer(
    make, topic, fill, get, wait_for, monkeypatch, code
):
    name, positions = topic(1), make()
    fill(name, 3)
    positions.start()
    before = get(lambda: positions.ask_ends(name))
    failed: Future[Any] = Future()
    failed.set_exception(KafkaException(KafkaError(getattr(KafkaError, code))))
    silent = Mock(describe_topics=Mock(return_value={name: failed}))
    with heard("loop.failed") as told, monkeypatch.context() as patch:
        patch.setattr(position_clients, "make_admin", Mock(return_value=silent))
        patch.setattr(positions._kafka, "_admin", silent)
        wait_for(
            lambda: positions.ask_ends(name, within=OLD) and told, what="it is told"
        )
        last = positions.ask_ends(name, within=OLD)
        assert last is not None
        assert last.offsets == before.offsets == {0: 3}
    assert "UnavailableError: no Kafka broker" in told[0][1]["error"]
    monkeypatch.setattr(positions._kafka, "_admin", None)
    fill(name, 1)
    get(lambda: (one := positions.ask_ends(name)) and one.offsets == {0: 4} and one)


def kill_again_and_again(broker, worker, wait_for, kills: int) -> None:
    """Kill the broker while a process asks it, which must live on."""

    def wait_for_more(word: str, more: int) -> None:
        before = worker.output.count(word)
        wait_for(
            lambda: worker.output.count(word) >= before + more or not worker.running,
            timeout=90,
            what=lambda: f"it says {word}\n{worker.output[-2_000:]}",
        )
        assert worker.running, worker.output[-2_000:]

    for _ in range(kills):
        wait_for_more("answered", 20)
        with broker.down():
            wait_for_more("failed", 1)
    wait_for_more("answered", 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_that_asks_outlives_a_broker_that_is_killed_again_and_again(
    own_broker, run_process, fill, wait_for
):
    name, group = own_broker.create(20), "asked"
    servers = own_broker.bootstrap_servers
    fill(name, *range(20), servers=servers)
    commit(servers, group, name, {n: n for n in range(20)})
    worker = run_process(
        "-m", "tests.support.asking", "positions", servers, name, group
    )
    expected = {n: n for n in range(20)}
    kill_again_and_again(own_broker, worker, wait_for, KILLS)
    assert f"answered {expected} {expected}" in worker.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sidecar_outlives_a_broker_that_is_killed_again_and_again(
    own_broker, run_process, fill, wait_for
):
    name, group = own_broker.create(1), "followed"
    servers = own_broker.bootstrap_servers
    commit(servers, group, name, {0: 0})
    worker = run_process("-m", "tests.support.asking", "members", servers, name, group)
    kill_again_and_again(own_broker, worker, wait_for, 30)
