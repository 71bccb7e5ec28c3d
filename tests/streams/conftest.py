"""A broker behind a proxy, and apps that publish to streams on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs_lib.streams.requests import Requests
from tests.support import brokers
from tests.support.apps import make_app
from tests.support.clock import Clock
from tests.support.records import Seen, read_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib import App


@pytest.fixture(scope="session")
def broker_of_run() -> Iterator[brokers.OwnBroker]:
    """The broker that these tests share, and that hardly any of them kills.

    After a kill of a single broker Kafka may hide a transaction for good.
    """
    with brokers.start_own_broker() as broker:
        yield broker


@pytest.fixture
def make(database_url, own_broker) -> Iterator[Callable[..., App]]:
    """A function that makes an app; `proxied=True` leads it through the proxy."""
    made: list[App] = []

    def make(*, proxied: bool = False, **settings) -> App:
        servers = own_broker.proxied if proxied else own_broker.bootstrap_servers
        app = make_app(database_url, kafka_bootstrap_servers=servers, **settings)
        made.append(app)
        return app

    yield make
    for app in made:
        app.close()


@pytest.fixture
def name(own_broker) -> str:
    """A topic of two partitions."""
    return own_broker.create(2)


@pytest.fixture
def read_log(own_broker) -> Callable[..., list[Seen]]:
    """A function that reads all events of a topic, or those of a key."""

    def read(topic: str, key: str | None = None) -> list[Seen]:
        seen = read_topic(own_broker.bootstrap_servers, topic)
        return [one for one in seen if key in (None, one.key)]

    return read


@pytest.fixture
def passing(monkeypatch) -> Clock:
    """The clock of publishes: a second passes with each look at a request."""
    clock, find = Clock(), Requests.find

    def look(self, *args):
        clock.now += 1
        return find(self, *args)

    monkeypatch.setattr("jobs_lib.streams.once.time", clock)
    monkeypatch.setattr(Requests, "find", look)
    return clock


@pytest.fixture
def await_read(admin, read_log, wait_for):
    """A function that waits until a group has handled all of a topic."""

    def wait(topic: str, group: str) -> None:
        ends = {one.partition: one.offset + 1 for one in read_log(topic)}
        query = (
            "select partition, next_offset from jobs_lib.offsets"
            " where topic = %s and consumer_group = %s"
        )

        def is_read() -> bool:
            found = admin.execute(query, (topic, group)).fetchall()
            return {*ends.items()} <= {*found}

        wait_for(is_read, timeout=30, what=f"{group} has read {topic}")

    return wait
