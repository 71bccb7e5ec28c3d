"""Logs of their own for tests, with short intervals."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from jobs_lib.coordination.log import Log
from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.coordination.messages import Sender
from jobs_lib.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTERVAL = 0.5


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
