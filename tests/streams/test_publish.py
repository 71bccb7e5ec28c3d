"""An event is published, and the answer is what Kafka has acknowledged."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from jobs_lib import (
    ConfigurationError,
    PayloadError,
    Published,
    TopicError,
    UnavailableError,
    UnknownPublishError,
)
from jobs_lib.operating.schemas import register_schemas
from jobs_lib.operating.topics import apply_topics, plan_topics
from tests.support.canary import VALUE


@dataclass
class Tenant:
    """The whole state of a tenant."""

    id: str
    email: str
    password_hash: str = "secret"


ADA = Tenant("t1", "ada@example.org")


@pytest.mark.guarantee("T1", "T5", "T12", "T13")
def test_the_answer_is_the_event_as_kafka_has_it_without_internal_fields(
    make, name, read_log
):
    tenants = make().stream(name, value=Tenant, key="id", internal={"password_hash"})
    created = tenants.publish("t1", ADA)
    changed = asyncio.run(tenants.publish_async("t1", Tenant("t1", "b@example.org")))
    deleted = tenants.publish("t1", None)
    log = read_log(name)
    assert [one.json for one in log] == [
        {"id": "t1", "email": "ada@example.org", "password_hash": "secret"},
        {"id": "t1", "email": "b@example.org", "password_hash": "secret"},
        None,
    ]
    contents = [
        {"id": "t1", "email": "ada@example.org"},
        {"id": "t1", "email": "b@example.org"},
        None,
    ]
    assert [created, changed, deleted] == [
        Published(name, one.partition, one.offset, "t1", content, changed=True)
        for one, content in zip(log, contents, strict=True)
    ]


@pytest.mark.guarantee("T1", "T12")
def test_many_callers_each_get_the_place_of_their_own_event(make, name, read_log):
    stream = make().stream(name, value=int)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: stream.publish(f"k{n}", n), range(200)))
    log = {(one.partition, one.offset): (one.key, one.json) for one in read_log(name)}
    assert len(log) == 200
    for n, answer in enumerate(answers):
        assert log[answer.partition, answer.offset] == (f"k{n}", n)


def test_a_publish_after_the_close_of_the_app_opens_its_clients_again(make, name):
    app = make()
    stream = app.stream(name)
    stream.publish("k", 1, request="r1")
    app.close()
    assert stream.publish("k", 2, request="r2").offset == 1


@pytest.mark.guarantee("T1")
def test_a_stream_may_be_avro(make, name, read_log):
    schema = {
        "type": "record",
        "name": "Tenant",
        "fields": [
            {"name": "id", "type": "string"},
            {"name": "email", "type": "string"},
            {"name": "password_hash", "type": "string"},
        ],
    }
    without = make()
    without.stream(name, value=Tenant, schema=schema)
    with pytest.raises(ConfigurationError, match="JOBS_LIB_SCHEMA_REGISTRY_URL"):
        without.load_schemas()
    app = make(schema_registry_url="mock://streams")
    tenants = app.stream(name, value=Tenant, schema=schema, internal=["password_hash"])
    register_schemas(app)
    app.load_schemas()
    answer = tenants.publish("t1", ADA)
    assert answer.content == {"id": "t1", "email": "ada@example.org"}
    (event,) = read_log(name)
    assert event.value[:1] == b"\0"
    assert event.headers["content-type"] == tenants.encoder.content_type


@pytest.mark.guarantee("T6")
@pytest.mark.parametrize(
    ("declared", "acks", "idempotence", "offset"),
    [
        ({}, "-1", "true", 1),
        ({"acks": "all"}, "-1", "true", 1),
        ({"acks": 1}, "1", "false", 1),
        ({"acks": 0}, "0", "false", None),
    ],
    ids=["default", "all", "1", "0"],
)
def test_the_acks_of_the_declaration_reach_the_producer(
    make, own_broker, read_log, wait_for, caplog, declared, acks, idempotence, offset
):
    caplog.set_level(logging.DEBUG, "jobs_lib.kafka")
    name = own_broker.create()
    # Kafka's client then logs how it is configured.
    stream = make(kafka={"debug": "conf"}).stream(name, value=int, **declared)
    stream.publish("k", 1)
    assert stream.publish("k", 2).offset == offset
    assert f"request.required.acks = {acks}" in caplog.text
    assert f"enable.idempotence = {idempotence}" in caplog.text
    # Without an acknowledgement, the broker may still have to store the events.
    wait_for(lambda: len(read_log(name)) == 2, timeout=30, what="both are stored")
    assert [one.json for one in read_log(name)] == [1, 2]


@pytest.mark.guarantee("T5")
def test_without_a_broker_a_publish_waits_and_tells_that_nobody_knows(
    make, name, own_broker, read_log
):
    # A busy machine may need seconds for the first one.
    stream = make(proxied=True, publish_timeout=5).stream(name, value=int)
    stream.publish("k", 1)
    own_broker.proxy.hold()

    def publish_async() -> Published:
        return asyncio.run(stream.publish_async("k", 3))

    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(stream.publish, "k", 2), pool.submit(publish_async)]
        for call in calls:
            with pytest.raises(UnknownPublishError, match=r"within 5 s .*Nobody knows"):
                call.result()
    own_broker.proxy.restore()
    make().stream(name, value=int).publish("k", 4)
    assert [one.json for one in read_log(name)] == [1, 4]


@pytest.mark.slow
@pytest.mark.guarantee("T5", "T7")
def test_every_answer_has_its_event_in_the_log_when_the_broker_is_killed(
    make, name, own_broker, read_log, wait_for
):
    stream = make(publish_timeout=3).stream(name, value=int)
    answers: list[Published] = []
    failures: list[UnavailableError] = []
    stop = threading.Event()

    def publish(caller: int) -> None:
        n = 0
        while not stop.is_set():
            n += 1
            try:
                answers.append(stream.publish(f"k{caller}", n))
            except UnavailableError as error:
                failures.append(error)

    callers = [threading.Thread(target=publish, args=(n,)) for n in range(4)]
    for caller in callers:
        caller.start()
    wait_for(lambda: len(answers) > 50, what="some are published")
    with own_broker.down():
        wait_for(lambda: failures, timeout=30, what="a caller has an error")
    before = len(answers)
    wait_for(lambda: len(answers) > before + 50, timeout=30, what="it goes on")
    stop.set()
    for caller in callers:
        caller.join()
    log = {(one.partition, one.offset): (one.key, one.json) for one in read_log(name)}
    for answer in answers:
        assert log[answer.partition, answer.offset] == (answer.key, answer.content)


@pytest.mark.guarantee("T8")
def test_an_event_over_the_limit_is_refused_and_not_sent(make, own_broker, read_log):
    name = own_broker.create(1, {"max.message.bytes": "2000"})
    value = VALUE + random.Random(1).randbytes(3_000).hex()  # no client can compress it
    unknown = make().stream(name, value=str)
    with pytest.raises(PayloadError, match="MSG_SIZE_TOO_LARGE") as refused:
        unknown.publish("k", value, request="r1")
    assert VALUE not in str(refused.value)
    declared = make().stream(name, value=str, config={"max.message.bytes": "2000"})
    with pytest.raises(PayloadError, match="a message there may have 2,000"):
        declared.publish("k", value)
    # What Kafka has refused is no request that was sent.
    assert unknown.publish("k", "small", request="r1").offset == 0
    assert [one.json for one in read_log(name)] == ["small"]


@pytest.mark.guarantee("T8")
@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("", ADA, "1 to 1000 bytes"),
        ("t1", {"id": "t1"}, "does not fit the stream"),
        ("t2", ADA, "holds another key"),
        ("t1", Tenant("t1", "a\0b\ud800"), "does not fit the stream"),
    ],
    ids=["no key", "a field is missing", "another key", "no text"],
)
def test_what_has_the_wrong_form_is_refused_and_not_sent(
    make, name, read_log, key, value, told
):
    tenants = make().stream(name, value=Tenant, key="id")
    with pytest.raises(PayloadError, match=told):
        tenants.publish(key, value)
    assert read_log(name) == []


@pytest.mark.parametrize("request_id", [None, "r1"])
def test_a_topic_that_is_missing_is_named(make, request_id):
    stream = make(publish_timeout=2).stream("nowhere", value=int)
    with pytest.raises(TopicError, match="has no topic 'nowhere'"):
        stream.publish("k", 1, request=request_id)


def test_a_producer_with_a_fatal_error_is_replaced(make, name, read_log, monkeypatch):
    stream = make().stream(name, value=int)
    stream.publish("k", 1)
    publisher = stream._publishing()._publisher
    broken = publisher._find("all")

    def refuse(*_: object) -> None:
        raise KafkaException(KafkaError(KafkaError._FATAL))

    monkeypatch.setattr(broken, "send", refuse)
    assert stream.publish("k", 2).offset == 1
    assert publisher._find("all") is not broken
    assert [one.json for one in read_log(name)] == [1, 2]


def test_a_producer_that_breaks_at_its_end_is_closed_with_all_others(
    make, name, monkeypatch
):
    stream = make().stream(name, value=int)
    stream.publish("k", 1, request="r1")
    publishing = stream._publishing()
    broken = publishing._publisher._find("all")

    class Broken:
        def flush(self, timeout: float) -> None:
            raise KafkaException(KafkaError(KafkaError._FATAL))

        def __getattr__(self, asked: str) -> Any:
            return getattr(producer, asked)

        def __len__(self) -> int:
            return len(producer)

    producer = broken._producer
    monkeypatch.setattr(broken, "_producer", Broken())
    ended: list[str] = []
    close = publishing._permits.close

    def close_last() -> None:
        ended.append("permits")
        close()

    monkeypatch.setattr(publishing._permits, "close", close_last)
    publishing.close()
    assert ended == ["permits"]
    assert not broken._loop._thread.is_alive()


@pytest.mark.guarantee("T3")
def test_the_topic_of_a_stream_is_created_compacted(make, own_broker, wait_for):
    app = make(request_seconds=3_600)
    name = f"{own_broker.create()}-tenants"
    app.stream(name, value=Tenant, partitions=4)
    (change,) = apply_topics(app)
    assert (change.topic, change.wanted) == (name, "4 partitions")
    wait_for(lambda: plan_topics(app) == [], what="Kafka names it")
    assert app.streams[name].config == {
        "cleanup.policy": "compact",
        "compression.type": "lz4",
        "delete.retention.ms": "172800000",
        # Requests are remembered for an hour, and removed within two more.
        "min.compaction.lag.ms": "10800000",
    }


def test_a_stream_whose_events_would_be_compacted_too_early_is_refused(make):
    app = make()
    app.stream("tenants", config={"min.compaction.lag.ms": "1000"})
    with pytest.raises(ConfigurationError, match=r"min\.compaction\.lag\.ms=1000"):
        apply_topics(app)
