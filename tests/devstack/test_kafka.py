from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its own names
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from jobs_lib.devstack.kafka import KafkaBroker
from jobs_lib.devstack.process import start_of
from jobs_lib.errors import DevStackError
from tests.support.records import make_producer


@pytest.fixture(scope="module")
def broker():
    with KafkaBroker.ephemeral(properties={"message.max.bytes": "54321"}) as broker:
        yield broker


def admin(broker):
    return AdminClient({"bootstrap.servers": broker.address, "log_level": 0})


def create(broker, topic):
    client = admin(broker)  # the answer gets lost with its client
    for future in client.create_topics([NewTopic(topic, 4)]).values():
        future.result(20)


def produce(broker, topic, value):
    failures = []
    producer = make_producer(broker.address)
    producer.produce(
        topic, value, partition=0, on_delivery=lambda error, _: failures.append(error)
    )
    assert producer.flush(20) == 0
    assert failures == [None]


def read(broker, topic):
    settings = {"bootstrap.servers": broker.address, "group.id": "test"}
    consumer = Consumer({**settings, "log_level": 0})
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        messages = consumer.consume(1, 20)
    finally:
        consumer.close()
    return [message.value() for message in messages]


@pytest.mark.slow
def test_records_survive_kill_and_restart_at_the_same_address(broker):
    address = broker.address
    create(broker, "kept")
    produce(broker, "kept", b"1")
    broker.kill()
    assert not broker.running
    broker.start()
    assert broker.address == address
    assert read(broker, "kept") == [b"1"]
    broker.restart()
    assert broker.address == address
    assert read(broker, "kept") == [b"1"]


def test_settings_are_passed(broker):
    resource = ConfigResource(ResourceType.BROKER, "1")
    client = admin(broker)
    future = client.describe_configs([resource])[resource]
    found = {name: entry.value for name, entry in future.result(20).items()}
    assert found["message.max.bytes"] == "54321"
    assert found["auto.create.topics.enable"] == "false"
    assert found["offsets.topic.num.partitions"] == "4"


def test_the_log_file_holds_the_messages_of_the_broker(broker):
    assert "INFO" in broker.log_file.read_text()


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            DevStackError, match=rf"port {port} for Kafka.*--kafka-port"
        ):
            KafkaBroker(port=port).start()


@pytest.mark.slow
def test_a_port_taken_in_the_meantime_is_replaced(monkeypatch):
    choices = iter([1])
    real = KafkaBroker._choose_port
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def choose(server, *, again):
            for _ in choices:
                return taken.getsockname()[1]
            return real(server, again=again)

        monkeypatch.setattr(KafkaBroker, "_choose_port", choose)
        with KafkaBroker.ephemeral() as broker:
            assert broker.port != taken.getsockname()[1]


def test_a_broker_that_dies_at_its_start_shows_its_log():
    broker = KafkaBroker.ephemeral(jvm=["-Xmx256m", "-XX:+NoSuchOption"])
    with pytest.raises(DevStackError, match="NoSuchOption"):
        broker.start()
    assert not broker.running


def test_settings_of_the_user_need_no_tool_to_make_the_folder(broker, monkeypatch):
    # The first broker has left what all need.
    assert broker.running
    monkeypatch.setattr(KafkaBroker, "_run_format_tool", Mock(side_effect=LookupError))
    with KafkaBroker.ephemeral(properties={"num.partitions": "3"}) as other:
        create(other, "topic")
        produce(other, "topic", b"v")
        assert read(other, "topic") == [b"v"]
    with pytest.raises(LookupError):
        # These make another folder.
        KafkaBroker.ephemeral(properties={"process.roles": "broker"}).start()


@pytest.mark.slow
def test_an_identifier_that_begins_with_a_hyphen_is_accepted(monkeypatch):
    class Hyphen:
        bytes = b"\xfb" * 16  # in base64: -_v7...

    monkeypatch.setattr("uuid.uuid4", Hyphen)
    # With this setting, the broker's tool always makes the folder.
    odd = {"unstable.feature.versions.enable": "true"}
    with KafkaBroker.ephemeral(properties=odd) as broker:
        text = (broker.folder / "data" / "meta.properties").read_text()
    assert "cluster.id=-_v7" in text


@pytest.mark.slow
def test_each_broker_has_an_identifier_of_its_own(tmp_path):
    identifiers = set()
    for name in ("one", "other"):  # the second time without the broker's tool
        with KafkaBroker(tmp_path / name) as broker:
            create(broker, "topic")
            cluster = admin(broker).list_topics(timeout=20).cluster_id
            text = (broker.folder / "data" / "meta.properties").read_text()
        assert f"cluster.id={cluster}" in text
        identifiers.add(cluster)
    assert len(identifiers) == 2


ABANDONED = """
import os, signal
from jobs_lib.devstack.kafka import KafkaBroker
broker = KafkaBroker.ephemeral().start()
print(broker.pid, broker.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_test_run_leaves_no_broker_and_no_folder():
    run = subprocess.run(
        [sys.executable, "-c", ABANDONED], capture_output=True, text=True, check=False
    )
    pid, folder = run.stdout.split()
    deadline = time.monotonic() + 20
    while start_of(int(pid)) is not None or Path(folder).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
