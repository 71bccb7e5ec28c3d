"""Logs of their own for tests, with short intervals."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer

from jobs_lib.cli.main import cli
from jobs_lib.coordination.consumer import Consumer
from jobs_lib.coordination.log import Log
from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.coordination.messages import Sender
from jobs_lib.errors import JobsError
from jobs_lib.settings import Settings, default_settings
from tests.coordination.commands import GROUP, INTERVAL, WAIT, Handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def settings(bootstrap_servers) -> Settings:
    """Settings that name the broker, and no database."""
    return Settings(kafka_bootstrap_servers=bootstrap_servers)


@pytest.fixture
def log_topic(topic) -> Callable[..., str]:
    """A function that creates a log: `log_topic(partitions=2, **config)`."""

    def create(partitions: int = 2, **config: str) -> str:
        given = {name.replace("_", "."): value for name, value in config.items()}
        name: str = topic(partitions, prefix="log", config=WANTED | given)
        return name

    return create


@pytest.fixture
def open_log(settings) -> Iterator[Callable[..., Log]]:
    """A function that starts to read a log: `open_log(topic, client_id="a")`."""
    opened: list[Log] = []

    def start(topic: str, client_id: str = "a", **more) -> Log:
        sender = Sender("shop.mailer", client_id, uuid.uuid4().hex)
        log = Log(settings, topic, sender, **({"interval": INTERVAL} | more))
        opened.append(log)
        log.start()
        return log

    yield start
    for log in opened:
        log.stop()


@pytest.fixture
def run(monkeypatch, bootstrap_servers):
    """A function that runs a command: `run(log, "pause", …, code=0)`."""
    monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", bootstrap_servers)

    def call(log: str, *words: object, code: int = 0) -> Any:
        monkeypatch.setenv("JOBS_LIB_COORDINATION_TOPIC", log)
        default_settings.cache_clear()
        done = CliRunner().invoke(cli, ["coordination", *map(str, words)])
        refused = isinstance(done.exception, JobsError)
        # What is refused leaves the command as one line, with exit code 2.
        assert (2 if refused else done.exit_code) == code, (done.output, done.exception)
        return done

    yield call
    default_settings.cache_clear()


@pytest.fixture
def publish(bootstrap_servers):
    """A function that writes so many records: `publish(topic, 10, partition=0)`."""

    def send(topic: str, count: int, partition: int = 0, at_ms: int = 0) -> None:
        producer = Producer({"bootstrap.servers": bootstrap_servers})
        for number in range(count):
            producer.produce(topic, str(number), partition=partition, timestamp=at_ms)
        producer.flush(WAIT)

    return send


@pytest.fixture
def consume(settings):
    """A function that starts a consumer: `consume(log, topic, client_id="a")`."""
    started: list[Consumer] = []
    handlers: list[Handler] = []

    def start(log: str, topic: str, **more: Any) -> tuple[Consumer, Handler]:
        handlers.append(Handler())
        given: dict[str, Any] = {"group": GROUP, "client_id": "a", "interval": INTERVAL}
        consumer = Consumer(
            settings, log=log, topics=[topic], handle=handlers[-1], **(given | more)
        )
        started.append(consumer)
        consumer.start()
        return consumer, handlers[-1]

    yield start
    for handler in handlers:
        handler.may_go.set()
    for consumer in started:
        consumer.stop()
