"""Every setting of librdkafka reaches every client, except unsafe ones."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trustme

from jobs_lib import App
from jobs_lib.errors import ConfigurationError
from jobs_lib.kafka import client
from jobs_lib.kafka.configuration import OURS
from jobs_lib.service.service import Service
from jobs_lib.settings import load_settings
from tests.security.helpers import CANARY

NOWHERE = {"database_url": "postgresql://h/d", "kafka_bootstrap_servers": "127.0.0.1:1"}
COMMON = {
    "broker.address.family": "v4",
    "client.rack": "a rack",
    "connections.max.idle.ms": "60000",
    "enable.metrics.push": "false",
    "log_level": "6",
    "reconnect.backoff.ms": "50",
    "socket.keepalive.enable": "true",
    "statistics.interval.ms": "0",
    "topic.metadata.refresh.interval.ms": "1000",
}
TLS = {
    "security.protocol": "sasl_ssl",
    "ssl.cipher.suites": "ECDHE-RSA-AES128-GCM-SHA256",
    "ssl.endpoint.identification.algorithm": "none",
    "ssl.key.password": CANARY,
    "enable.ssl.certificate.verification": "false",
}
SASL = {
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": "alice",
    "sasl.password": f'{CANARY}" with \\ and = and ünïcode',
}
CONSUMER = {
    "fetch.min.bytes": "10",
    "max.partition.fetch.bytes": "2000000",
    "max.poll.interval.ms": "400000",
    "check.crcs": "true",
}
PRODUCER = {
    "linger.ms": "7.5",
    "compression.type": "zstd",
    "batch.size": "100000",
    "max.in.flight.requests.per.connection": "2",
    "topic.metadata.propagation.max.ms": "900",
}


@pytest.fixture
def made(monkeypatch) -> list[dict[str, Any]]:
    """The settings with which each client was made; the clients are real."""
    found: list[dict[str, Any]] = []
    for name in ("Consumer", "Producer", "AdminClient"):
        kind = getattr(client, name)

        def make(configuration: dict[str, Any], kind=kind, **options: Any) -> Any:
            found.append(configuration)
            return kind(configuration, **options)

        monkeypatch.setattr(client, name, make)
    return found


def refuse(kafka: dict[str, str]) -> str:
    """Start a service with these settings, which no server sees; return the text."""
    app = App("refused", settings=load_settings(**NOWHERE, kafka=kafka))
    with pytest.raises(ConfigurationError) as caught:
        Service(app).start()
    assert CANARY not in f"{caught.value!r}"
    return str(caught.value)


@pytest.mark.guarantee("FS9")
def test_every_key_goes_unchanged_to_every_client(made, tmp_path, caplog):
    authority = trustme.CA()
    leaf = authority.issue_cert("alice@example.com")
    folder = tmp_path / "a folder, with ünïcode"
    folder.mkdir()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    given = {
        **(COMMON | TLS | SASL | CONSUMER | PRODUCER),
        "ssl.ca.location": str(folder / "ca.pem"),
        "ssl.certificate.pem": leaf.cert_chain_pems[0].bytes().decode(),
        "ssl.key.pem": leaf.private_key_pem.bytes().decode(),
    }
    settings = load_settings(**NOWHERE, kafka=given)
    with caplog.at_level(logging.DEBUG):
        consumer = client.make_consumer(settings, "group")
        for one in (
            client.make_producer(settings, "id", 5),
            client.make_admin(settings),
            consumer,
        ):
            one.poll(0)  # this lets it log
        consumer.close()
    assert len(made) == 3
    for configuration in made:
        assert {key: configuration[key] for key in given} == given
    # A key for another kind of client does no harm, and is not logged either.
    assert not [r for r in caplog.records if "property" in r.getMessage()]
    # The service starts, unless one of the keys is unknown.
    client.check_settings(settings)
    assert '"ssl.ca.locatoin"' in refuse(given | {"ssl.ca.locatoin": "a file"})


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("sasl.pasword", CANARY, 'No such configuration property: "sasl.pasword"'),
        ("bootstrap_servers", "h:1", '"bootstrap_servers"'),
        ("fetch.min.byte", "1", '"fetch.min.byte"'),
        ("linger", "1", '"linger"'),
        ("key.serializer", "x", '"key.serializer"'),
        ("security.protocol", CANARY, '"security.protocol"'),
        ("sasl.jaas.config", CANARY, "sasl.jaas.config"),
        ("linger.ms", CANARY, "linger.ms"),
        ("fetch.min.bytes", CANARY, "fetch.min.bytes"),
        ("ssl.ca.pem", CANARY, "ssl.ca.pem"),
        # For a producer only, with the forced settings.
        ("max.in.flight.requests.per.connection", "6", "max.in.flight"),
        ("retries", "0", "retries"),
        # For a consumer only.
        ("max.poll.interval.ms", "1", "max.poll.interval.ms"),
        ("error_cb", "x", "error_cb is a Python object"),
        ("logger", "x", "logger is a Python object"),
        ("default.topic.config", "x", "default.topic.config is a Python object"),
    ],
)
def test_an_unknown_key_or_value_is_refused_at_the_start(key, value, what):
    tls = {"security.protocol": "ssl"} if key.startswith("ssl.") else {}
    text = refuse(tls | {key: value})
    assert what in text
    assert "JOBS_LIB_KAFKA" in text


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("acks", "1", "acks=all"),
        ("acks", "0", "acks=all"),
        ("request.required.acks", "1", "acks=all"),
        ("enable.idempotence", "false", "enable.idempotence=True"),
        ("partitioner", "consistent_random", "partitioner=murmur2_random"),
        ("enable.auto.commit", "true", "enable.auto.commit=False"),
        ("auto.commit.enable", "true", "auto.commit.enable=False"),
        ("enable.auto.offset.store", "true", "enable.auto.offset.store=False"),
        ("auto.offset.reset", "earliest", "auto.offset.reset=error"),
        ("isolation.level", "read_uncommitted", "isolation.level=read_committed"),
        *((key, "1", setting) for key, setting in OURS.items()),
        ("group.id", "mine", "the declaration of a consumer"),
        ("transactional.id", "mine", "each shard"),
    ],
)
def test_settings_that_would_lose_records_or_have_another_place_are_refused(
    key, value, needed
):
    text = refuse({key: value})
    assert key in text
    assert needed in text
    assert "JOBS_LIB_KAFKA" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("acks", "all"),
        ("request.required.acks", "all"),
        ("enable.idempotence", "true"),
        ("enable.idempotence", "True"),
        ("partitioner", "murmur2_random"),
        ("isolation.level", "read_committed"),
        ("auto.offset.reset", "error"),
    ],
)
def test_a_forced_setting_may_be_repeated(made, key, value):
    client.check_settings(load_settings(**NOWHERE, kafka={key: value}))
    _, consumer, producer = made
    assert (producer["acks"], producer["enable.idempotence"]) == ("all", True)
    assert consumer["isolation.level"] == "read_committed"
