"""The producers of the shards: none is destroyed while an answer may come."""

from __future__ import annotations

import gc
import threading
import time
from functools import partial
from uuid import UUID

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from jobs_lib.kafka import client
from jobs_lib.kafka.reach import Reach
from jobs_lib.outbox import producers as producers_module
from jobs_lib.outbox.block import LIVE, OutboxRecord
from jobs_lib.outbox.producers import ShardProducers
from jobs_lib.settings import load_settings
from tests.support import create_topic, delete_topics
from tests.support.apps import heard
from tests.support.records import read_topic
from tests.support.waiting import linger, wait_for

SECONDS = 60.0


@pytest.fixture
def destroyed(monkeypatch):
    """How many records of each sending producer had no answer at its destruction."""
    found: list[int] = []

    class Watched(Producer):
        sent = False

        def begin_transaction(self) -> None:
            self.sent = True
            super().begin_transaction()

        def __del__(self) -> None:
            if self.sent:
                found.append(len(self))

    monkeypatch.setattr(client, "Producer", Watched)
    return found


@pytest.fixture
def make():
    """A function that makes the producers of a relay."""

    def make(bootstrap_servers: str, **kafka: str) -> ShardProducers:
        settings = load_settings(
            kafka_bootstrap_servers=bootstrap_servers, session_timeout=4.0, kafka=kafka
        )
        stopping = threading.Event()
        return ShardProducers(settings, UUID(int=1), stopping, Reach(settings, 2.0))

    return make


@pytest.fixture
def cut_off(own_broker, make, destroyed):
    """Producers; one of them has sent records and was dropped before any answer."""
    topic = own_broker.create(4)
    producers = make(own_broker.proxied)
    # A coordinator that still loads may take longer than a producer waits.
    wait_for(lambda: not producers.fence_off({0}), timeout=60)
    producers.send(0, block(topic), lambda: None)
    own_broker.proxy.freeze()
    try:
        with pytest.raises(KafkaException):
            producers.send(0, block(topic), lambda: None)
        producers.drop(0)
        yield producers
    finally:
        own_broker.proxy.thaw()


def block(topic: str) -> list[OutboxRecord]:
    """A few records."""
    return [
        OutboxRecord(
            topic, f"k{n}", b"value", LIVE, n, b"", [("name", "value")], "noon"
        )
        for n in range(5)
    ]


def let_go(producers: ShardProducers, destroyed: list[int]) -> list[int]:
    """Do what a sender's round does, and drop what an error may still hold."""
    producers.keep(())
    gc.collect()
    return destroyed


@pytest.mark.guarantee("FK14")
@pytest.mark.parametrize("ending", ["rounds", "close"])
def test_a_producer_is_not_destroyed_before_its_records_are_answered(
    own_broker, cut_off, destroyed, ending
):
    gc.collect()
    assert destroyed == []
    own_broker.proxy.thaw()
    if ending == "close":
        cut_off.close()
    wait_for(lambda: let_go(cut_off, destroyed), timeout=60)
    assert destroyed == [0]


@pytest.mark.guarantee("FK14")
def test_closing_the_producers_waits_no_longer_than_for_a_transaction(
    cut_off, destroyed
):
    began = time.monotonic()
    cut_off.close()
    assert time.monotonic() - began < 10
    assert len(let_go(cut_off, destroyed)) == 1


def remembers_missing(producers: ShardProducers, topic: str) -> bool:
    """Tell whether shard 0's client refuses a topic without asking the broker."""
    (producer,) = producers._made.values()
    producer.begin_transaction()
    try:
        producer.produce(topic, b"value")
    except KafkaException as error:
        return error.args[0].code() == KafkaError._UNKNOWN_TOPIC
    finally:
        producer.abort_transaction(10)
    return False


@pytest.mark.guarantee("FK9")
def test_a_topic_is_sent_to_as_soon_as_it_is_there(
    bootstrap_servers, kafka_admin, topic, make
):
    name = f"{topic()}-missing"
    producers = make(bootstrap_servers)
    wait_for(lambda: not producers.fence_off({0}), timeout=60)
    sent, refused = producers.send(0, block(name), lambda: None)
    assert (sent, [one.whole_topic for one in refused]) == ([], [True])
    wait_for(lambda: remembers_missing(producers, name), timeout=60)
    create_topic(kafka_admin, name, 4)
    try:
        records = block(name)
        assert producers.send(0, records, lambda: None) == (records, [])
    finally:
        delete_topics(kafka_admin, [name])


@pytest.mark.guarantee("FK10")
def test_thousands_that_the_client_finds_too_large_keep_back_no_other(
    bootstrap_servers, topic, make
):
    name = topic(4)
    producers = make(bootstrap_servers, **{"message.max.bytes": "1000"})
    wait_for(lambda: not producers.fence_off({0}), timeout=60)
    records = [
        OutboxRecord(
            name, f"k{n}", b"v" * (1 if n % 2 else 2_000), LIVE, n, b"", [], "noon"
        )
        for n in range(4_000)
    ]
    for _ in range(2):
        sent, refused = producers.send(0, records, lambda: None)
        assert sent == records[1::2]
        assert [one.record for one in refused] == records[::2]
    found = read_topic(bootstrap_servers, name)
    assert sorted(one.key for one in found) == sorted(2 * [one.key for one in sent])


def is_ready(producers: ShardProducers, shards: set[int]) -> bool:
    """Make the missing producers; tell whether each shard has one."""
    return not producers.fence_off(shards - producers.shards)


@pytest.mark.guarantee("W8")
def test_producers_of_several_shards_do_not_fence_one_another(
    bootstrap_servers, topic, make
):
    name = topic(4)
    # These are the producers of two relays, which share the shards.
    relays = [(make(bootstrap_servers), {0, 2}), (make(bootstrap_servers), {1, 3})]
    for producers, shards in relays:
        wait_for(partial(is_ready, producers, shards), timeout=60)
    for _ in range(2):
        for producers, shards in relays:
            for shard in shards:
                records = block(name)
                assert producers.send(shard, records, lambda: None) == (records, [])


@pytest.mark.slow
@pytest.mark.guarantee("FK14")
@pytest.mark.timeout(SECONDS + 180)
def test_processes_that_fence_one_another_live_on(own_broker, run_process):
    topics = ",".join(own_broker.create(4) for _ in range(2))
    ways = [own_broker.proxied, own_broker.bootstrap_servers]
    fencers = [
        run_process("-m", "tests.support.outbox.fencers", way, topics, f"{SECONDS}")
        for way in [*ways, ways[-1]]
    ]
    for fencer in fencers:
        fencer.wait_for_line("^started$")
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and all(one.running for one in fencers):
        with own_broker.down():
            pass
        own_broker.proxy.reset()
        fencers[-1].pause()
        linger(3)
        fencers[-1].resume()
    for fencer in fencers:
        assert fencer.wait(timeout=90) == 0, fencer.output


@pytest.mark.guarantee("FK14")
def test_a_coordinator_that_is_none_yet_is_asked_again(
    bootstrap_servers, make, topic, monkeypatch
):
    asked: list[Producer] = []
    init = client.init_transactions

    def init_late(producer: Producer, timeout: float) -> KafkaError | None:
        asked.append(producer)
        if len(asked) == 1:
            return KafkaError(KafkaError.NOT_COORDINATOR)
        return init(producer, timeout)

    monkeypatch.setattr(producers_module, "init_transactions", init_late)
    name, producers = topic(1), make(bootstrap_servers)
    with heard("loop.failed") as told:
        wait_for(lambda: not producers.fence_off({0}), timeout=60)
    assert told == []
    # Its client takes that for the answer, and is not asked again.
    assert asked[0] is not asked[1]
    producers.send(0, block(name), lambda: None)
    assert len(read_topic(bootstrap_servers, name)) == 5
    producers.close()
