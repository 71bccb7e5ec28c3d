"""Unsafe settings of Kafka's clients are refused."""

from __future__ import annotations

import pytest

from jobs_lib.errors import ConfigurationError, UnavailableError
from jobs_lib.kafka import places, topic_settings
from jobs_lib.kafka.client import check_settings
from jobs_lib.settings import load_settings


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
    settings = load_settings(kafka_bootstrap_servers="127.0.0.1:1", kafka={name: value})
    with pytest.raises(ConfigurationError, match=f"{name}={value} is refused"):
        check_settings(settings)


@pytest.mark.parametrize(("version", "fits"), [(0x020E02FF, False), (0x020F00FF, True)])
def test_the_new_protocol_needs_a_client_that_knows_it(monkeypatch, version, fits):
    settings = load_settings(
        kafka_bootstrap_servers="127.0.0.1:1", group_protocol="consumer"
    )
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
    settings = load_settings(kafka_bootstrap_servers="127.0.0.1:1")
    with pytest.raises(UnavailableError, match=r"no Kafka broker at 127\.0\.0\.1:1"):
        ask(settings)
