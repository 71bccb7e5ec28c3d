"""Unsafe settings of Kafka's clients are refused."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException

from jobs_lib.errors import AccessError, ConfigurationError, UnavailableError
from jobs_lib.kafka import partitions, places, topic_settings
from jobs_lib.kafka.client import check_settings, read_topic_ids
from jobs_lib.kafka.refusal import DESTROY_BROKER
from jobs_lib.settings import load_settings

NOWHERE = "127.0.0.1:1"


@pytest.mark.guarantee("K16")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", "1"),
        ("enable.idempotence", "false"),
        ("partitioner", "random"),
        ("isolation.level", "read_uncommitted"),
        ("enable.auto.commit", "true"),
    ],
)
def test_settings_that_would_lose_or_mix_up_records_are_refused(name, value):
    settings = load_settings(kafka_bootstrap_servers=NOWHERE, kafka={name: value})
    with pytest.raises(ConfigurationError, match=f"{name}={value} is refused"):
        check_settings(settings)


@pytest.mark.parametrize(("version", "fits"), [(0x020E02FF, False), (0x020F00FF, True)])
def test_the_new_protocol_needs_a_client_that_knows_it(monkeypatch, version, fits):
    settings = load_settings(kafka_bootstrap_servers=NOWHERE, group_protocol="consumer")
    monkeypatch.setattr("confluent_kafka.libversion", lambda: ("2.14.2", version))
    if fits:
        check_settings(settings)
        return
    with pytest.raises(ConfigurationError, match=r"needs confluent-kafka 2\.15"):
        check_settings(settings)


@pytest.mark.parametrize(
    "ask",
    [
        lambda settings: topic_settings.read_effective(settings, "orders", ["x"]),
        lambda settings: topic_settings.change(settings, "orders", {"x": None}),
        lambda settings: places.read_policy(settings, "orders"),
    ],
    ids=["read", "set", "policy"],
)
def test_brokers_that_do_not_answer_refuse_nothing(monkeypatch, ask):
    monkeypatch.setattr(topic_settings, "_SECONDS", 0.3)
    monkeypatch.setattr(places, "_CONFIG_SECONDS", 0.3)
    settings = load_settings(kafka_bootstrap_servers=NOWHERE)
    with pytest.raises(UnavailableError, match=r"no Kafka broker at 127\.0\.0\.1:1"):
        ask(settings)


def fail(code: str) -> Any:
    """An admin client whose questions about topics all get this error."""
    failed: Future[Any] = Future()
    # Old clients have no name for this one.
    is_lost = code == "_DESTROY_BROKER"
    number = DESTROY_BROKER if is_lost else getattr(KafkaError, code)
    failed.set_exception(KafkaException(KafkaError(number)))

    def answer(asked: Any, **options: Any) -> dict[Any, Future[Any]]:
        return dict.fromkeys(asked, failed)

    return Mock(
        describe_topics=lambda asked, **options: {"orders": failed},
        list_offsets=answer,
        create_partitions=lambda asked, **options: {"orders": failed},
    )


@pytest.mark.parametrize(
    "code", ["_DESTROY_BROKER", "_FAIL", "_TIMED_OUT", "LEADER_NOT_AVAILABLE"]
)
def test_a_topic_of_which_nothing_is_said_is_not_taken_for_a_missing_one(code):
    settings = load_settings(kafka_bootstrap_servers=NOWHERE)
    with pytest.raises(UnavailableError, match="answers for 'orders'"):
        read_topic_ids(settings, ["orders"], client=fail(code))


def test_the_right_that_is_lacking_to_read_the_id_of_a_topic_is_named():
    settings = load_settings(kafka_bootstrap_servers=NOWHERE)
    refused = fail("CLUSTER_AUTHORIZATION_FAILED")
    with pytest.raises(AccessError, match="DESCRIBE"):
        read_topic_ids(settings, ["orders"], client=refused)


@pytest.mark.parametrize(
    "code", ["UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "TOPIC_AUTHORIZATION_FAILED"]
)
def test_a_topic_that_is_missing_or_hidden_has_no_id(code):
    settings = load_settings(kafka_bootstrap_servers=NOWHERE)
    assert read_topic_ids(settings, ["orders"], client=fail(code)) == {}


@pytest.mark.parametrize("code", ["_DESTROY_BROKER", "_TRANSPORT"])
def test_a_connection_that_ends_leaves_no_partition_out(monkeypatch, code):
    settings = load_settings(kafka_bootstrap_servers=NOWHERE)
    monkeypatch.setattr(places, "make_admin", lambda settings: fail(code))
    with pytest.raises(UnavailableError, match=f"no Kafka broker at {NOWHERE}"):
        places.read_ends(settings, ["orders/0"], timeout=0.3)


@pytest.mark.parametrize("code", ["_DESTROY_BROKER", "_TRANSPORT"])
def test_partitions_may_be_there_after_a_connection_has_ended(monkeypatch, code):
    settings = load_settings(kafka_bootstrap_servers=NOWHERE)
    admin = fail(code)
    asked = Mock(side_effect=admin.create_partitions)
    admin.create_partitions = asked
    monkeypatch.setattr(partitions, "make_admin", lambda settings: admin)
    partitions.add_partitions(settings, "orders", 8)
    assert asked.call_count == 1
