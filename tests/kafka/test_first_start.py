"""A first start names each missing part in one line, with a way out."""

from __future__ import annotations

import logging
import time

import pytest

from jobs_lib import telemetry
from tests.support.apps import heard, make_app, running

AWAY = "127.0.0.1:1"
PREFIX = "[rdkafka#producer-7] [thrd:{}]: "
LOADING = (
    "Failed to acquire transactional PID from broker TxnCoordinator/1: Broker: "
    "Coordinator load in progress: retrying"
)


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch, caplog):
    """Let no warning of an earlier test suppress one here."""
    monkeypatch.setattr(telemetry, "_lines", {})
    caplog.set_level(logging.INFO, "jobs_lib")


def warnings(caplog) -> list[str]:
    """The lines about trouble, from the library and from librdkafka."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("jobs_lib") and record.levelno > logging.INFO
    ]


@pytest.fixture
def model_table(admin):
    """The table that the read models write."""
    admin.execute("create table t (id text primary key, version bigint)")


def declare(app, topic: str) -> None:
    """Declare two read models, and a topic to relay."""
    app.topic(topic)
    app.topic(f"{topic}-too")
    for name in (topic, f"{topic}-more"):
        app.read_model(name, table="t", key="id", group=f"{name}-g")(lambda record: {})


@pytest.mark.guarantee("U4", "O5")
def test_a_service_without_kafka_logs_one_line_for_all_parts(
    database_url, model_table, caplog, wait_for
):
    app = make_app(database_url, kafka_bootstrap_servers=AWAY, session_timeout=2.0)
    declare(app, "orders")
    began = time.monotonic()
    with heard("loop.failed") as failed, running(app):
        wait_for(
            lambda: len({fields["loop"] for _, fields in failed}) > 2,
            timeout=60,
            what=lambda: f"the start and two shards have failed: {failed}",
        )
        # Each ten seconds of an outage may bring another one.
        most = 1 + (time.monotonic() - began) / 10
        lines = [line for line in warnings(caplog) if "Kafka" in line]
    assert 1 <= len(lines) <= most, lines
    assert f"no Kafka broker at {AWAY} answers within 5 s: " in lines[0]
    assert "Is it running, and are JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS and" in lines[0]
    assert not [line for line in warnings(caplog) if "[thrd:" in line]
    for _, fields in failed:
        assert f"no Kafka broker at {AWAY} answers" in fields["error"]


@pytest.mark.guarantee("U4")
def test_topics_missing_on_a_new_broker_are_named_in_one_line(
    database_url, model_table, bootstrap_servers, topic, caplog, wait_for, monkeypatch
):
    # However long the second consumer takes to notice it.
    monkeypatch.setattr(telemetry, "_PAUSE", 600.0)
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    name = f"{topic()}-missing"
    declare(app, name)
    with heard("loop.failed") as failed, running(app):
        wait_for(
            lambda: len({fields["loop"] for _, fields in failed}) == 2,
            timeout=60,
            what=lambda: f"both consumers have noticed: {failed}",
        )
        (line,) = warnings(caplog)
    assert f"Kafka at {bootstrap_servers} has no topic " in line
    assert f"'{name}', '{name}-more', '{name}-too', or does not show it: " in line
    assert "`jobs-lib topics apply MODULE:APP` creates what the app declares" in line
    for _, fields in failed:
        assert "`jobs-lib topics apply MODULE:APP`" in fields["error"]


@pytest.mark.parametrize(
    ("kind", "broker", "text", "lines"),
    [
        ("GETPID", "main", LOADING, 0),
        ("GETPID", "main", "Failed to acquire transactional PID: denied", 3),
        ("FAIL", f"{AWAY}/bootstrap", "Connect to ipv4#127.0.0.1:1 failed", 0),
        ("ERROR", "kafka-2:9092/2", "Connect to ipv4#10.0.0.2:9092 failed", 1),
        ("PARTCNT", "main", "Topic t partition count changed", 3),
    ],
    ids=["loading", "denied", "bootstrap", "one of several", "another"],
)
def test_a_line_of_the_client_is_kept_where_nothing_else_says_it(
    caplog, kind, broker, text, lines
):
    logger = logging.getLogger("jobs_lib.kafka")
    # Each client has a thread for each broker, and each logs the same.
    for _ in range(3):
        logger.warning("%s %s%s", kind, PREFIX.format(broker), text)
    assert len(warnings(caplog)) == lines
