"""Spark reads a topic in parts, up to the ends that it had before."""

from __future__ import annotations

import pickle

import pytest
from confluent_kafka import Producer
from pyspark import cloudpickle
from pyspark.sql import Row

from jobs_lib.errors import TopicError
from jobs_lib.kafka.keys import Piece, cut
from jobs_lib.settings import load_settings
from spark_bridge.topic import TopicPart, _make_source, find_newest, read_topic
from tests.support.records import produce
from tests.support.transactions import abort_when_waited_for, open_transaction

SECRET = "tell-nobody"


@pytest.fixture
def settings(bootstrap_servers):
    """The settings of a client, with a password that nobody asks for."""
    return load_settings(
        kafka_bootstrap_servers=bootstrap_servers, kafka={"sasl.password": SECRET}
    )


@pytest.fixture
def send(bootstrap_servers):
    """A function that sends records to a topic in a transaction, and may abort it."""

    def send(topic, records, *, abort=False, partition=0):
        producer = Producer(
            {"bootstrap.servers": bootstrap_servers, "transactional.id": f"to-{topic}"}
        )
        producer.init_transactions(60)
        producer.begin_transaction()
        for key, value, version in records:
            headers = [("ce_version", "7"), ("ce_version", version)]
            producer.produce(
                topic, value, key, partition, headers=headers if version else []
            )
        producer.flush(60)
        if abort:
            producer.abort_transaction(60)
        else:
            producer.commit_transaction(60)

    return send


def _keys(number):
    return [f"{number}-{n}" for n in range(10)]


def rows_of(frame):
    return sorted(tuple(row) for row in frame.collect())


def test_the_records_of_a_topic_are_rows_with_key_version_and_tombstone(
    spark, settings, topic, send
):
    name = topic(2)
    send(name, [("a", b"1", "3"), ("b", None, "4"), (None, b"", None)])
    # Neither of them is a key that a producer of ours has written.
    send(name, [(b"\xff", b"2", "x"), ("c", b"3", "-1")], partition=1)
    send(name, [("lost", b"4", "5")], abort=True)
    part = TopicPart.of(settings, name)
    send(name, [("late", b"5", "6")])
    found = [tuple(row) for row in read_topic(spark, part).collect()]
    assert sorted(found, key=lambda row: row[:2]) == [
        (0, 0, "a", 3, False),
        (0, 1, "b", 4, True),
        (0, 2, None, None, False),
        (1, 0, None, None, False),
        (1, 1, "c", None, False),
    ]


def test_parts_of_a_partition_are_read_by_several_tasks_once(
    spark, settings, topic, send
):
    name = topic(2)
    for number in range(4):
        records = [(key, key.encode(), "1") for key in _keys(number)]
        send(name, records, partition=number % 2)
    whole = TopicPart.of(settings, name, values=True)
    part = TopicPart(whole.settings, name, whole.starts, whole.ends, True, size=7)
    frame = read_topic(spark, part)
    assert frame.rdd.getNumPartitions() == 8
    rows = frame.collect()
    assert len(rows) == 40
    found = {row.key: bytes(row.value).decode() for row in rows}
    assert found == {key: key for n in range(4) for key in _keys(n)}


def test_the_newest_record_of_a_key_is_its_last_one(spark, settings, topic, send):
    name = topic(2)
    send(name, [("a", b"1", "3"), ("b", b"1", "1"), ("a", None, "4"), (None, b"", "9")])
    # The topic has grown, and the key has moved.
    send(name, [("b", None, "2")], partition=1)
    newest = find_newest(read_topic(spark, TopicPart.of(settings, name)))
    assert newest.columns[:5] == ["key", "partition", "offset", "version", "tombstone"]
    assert newest.columns[5:] == ["highest", "records"]
    assert rows_of(newest) == [("a", 0, 2, 4, True, 4, 2), ("b", 1, 0, 2, True, 2, 2)]


def test_an_empty_topic_gives_no_row(spark, settings, topic):
    part = TopicPart.of(settings, topic(3))
    assert rows_of(find_newest(read_topic(spark, part))) == []


def test_a_topic_that_is_not_there_is_named(settings):
    with pytest.raises(TopicError, match="no-such-topic"):
        TopicPart.of(settings, "no-such-topic")


@pytest.mark.guarantee("X15", "FS13")
def test_no_password_of_kafka_reaches_plans_and_the_event_log(
    spark, event_log, settings, topic, send
):
    name = topic()
    send(name, [("a", b"1", "3")])
    part = TopicPart.of(settings, name)
    frame = read_topic(spark, part)
    assert frame.collect() == [
        Row(partition=0, offset=0, key="a", version=3, tombstone=False)
    ]
    assert SECRET not in repr(part)
    plan = frame._jdf.queryExecution().toString()
    assert "jobs_lib_topic" in plan
    assert SECRET not in plan
    logs = [path.read_bytes() for path in event_log.rglob("*") if path.is_file()]
    assert any(b"jobs_lib_topic" in log for log in logs)
    assert not any(SECRET.encode() in log for log in logs)
    # A task that fails is reported with its traceback.
    gone = TopicPart(part.settings, "no-such-topic", {0: 0}, {0: 5})
    with pytest.raises(Exception, match="no-such-topic") as raised:
        read_topic(spark, gone).collect()
    assert SECRET not in str(raised.value)
    logs = [path.read_bytes() for path in event_log.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in log for log in logs)


@pytest.mark.guarantee("X15")
def test_tasks_get_no_secret_of_the_database_or_the_schema_registry(
    bootstrap_servers, topic
):
    secrets = [f"canary-{n}" for n in range(4)]
    settings = load_settings(
        kafka_bootstrap_servers=bootstrap_servers,
        database_url=f"postgresql://ada:{secrets[0]}@127.0.0.1/x",
        direct_url=f"postgresql://ada:{secrets[1]}@127.0.0.1/x",
        schema_registry_url=f"https://ada:{secrets[2]}@registry.example",
        schema_registry={"basic.auth.user.info": f"ada:{secrets[3]}"},
    )
    part = TopicPart.of(settings, topic())
    for pickled in (pickle.dumps(part), cloudpickle.dumps(_make_source(part))):
        assert bootstrap_servers.encode() in pickled
        assert [one for one in secrets if one.encode() in pickled] == []


def test_pieces_cover_each_offset_once():
    assert cut({0: 5, 1: 3, 2: 0}, {0: 25, 1: 3, 2: 4}, 10) == [
        Piece(0, None, 15),
        Piece(0, 15, 25),
        Piece(2, None, 4),
    ]
    assert cut({0: 5}, {0: 8}, 10, oldest=False) == [Piece(0, 5, 8)]
    # The log was cut beyond an end that was taken before.
    assert cut({0: 9}, {0: 5}, 10) == []
    assert cut({0: 0}, {0: 100}, 10, most=4) == [
        Piece(0, None, 25),
        Piece(0, 25, 50),
        Piece(0, 50, 75),
        Piece(0, 75, 100),
    ]


def test_a_part_has_what_is_committed_behind_an_open_transaction(
    settings, topic, monkeypatch
):
    name = topic(1)
    producer = open_transaction(settings.kafka_bootstrap_servers, name, 1)
    produce(settings.kafka_bootstrap_servers, name, [("a", {})])
    abort_when_waited_for(monkeypatch, producer)
    part = TopicPart.of(settings, name)
    found = [
        key
        for piece in part.cut()
        for block in part.read(piece)
        for key in block["key"]
    ]
    assert [str(key) for key in found] == ["a"]
