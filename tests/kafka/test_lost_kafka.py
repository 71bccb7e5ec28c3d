"""All pods lose Kafka, while PostgreSQL is there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient

from jobs_lib.devstack import KafkaBroker
from tests.support import create_topic
from tests.support.apps import heard, make_app, running

if TYPE_CHECKING:
    from collections.abc import Iterator

TOPICS = {"member": "of-members", "follow": "of-followers"}
"""The home topic of each kind of executor."""


@pytest.fixture
def broker() -> Iterator[KafkaBroker]:
    """A broker of this test alone."""
    with KafkaBroker.ephemeral() as broker:
        yield broker


@pytest.fixture
def ran() -> list[str]:
    """The kinds of the executors that have run a job."""
    return []


@pytest.fixture
def make(database_url, broker, ran):
    """A function that makes the app of a kind, with its home topic."""
    client = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    lock = threading.Lock()

    def make(kind: str):
        create_topic(client, TOPICS[kind], 2, None)
        app = make_app(
            database_url,
            pod=f"pod-{kind}",
            kafka_bootstrap_servers=broker.bootstrap_servers,
        )

        @app.consumer(TOPICS[kind], group=f"{kind}-g")
        def handle(record, connection) -> None: ...

        @app.job(name=kind)
        def work(job) -> None:
            with lock:
                ran.append(kind)

        return app

    return make


@pytest.fixture
def enqueue(admin):
    """A function that enqueues a job in an origin of a kind."""

    def enqueue(kind: str) -> None:
        admin.execute(
            "insert into jobs_lib.jobs (origin, type, payload) values (%s, %s, '{}')",
            (f"{TOPICS[kind]}/0", kind),
        )

    return enqueue


@pytest.fixture
def owned(admin):
    """A function that says how many origins the executors of each kind own."""

    def owned() -> dict[str, int]:
        count = (
            "select count(*) from jobs_lib.origins"
            " where role = 'execute' and owner is not null and origin like %s || '/%%'"
        )
        return {
            kind: admin.execute(count, (topic,)).fetchone()[0]
            for kind, topic in TOPICS.items()
        }

    return owned


@pytest.mark.slow
@pytest.mark.expects("loop.failed", "origins.lost")
@pytest.mark.guarantee("FK7")
def test_executors_that_lose_kafka_stop_in_time_and_go_on_when_it_is_back(
    broker, make, ran, enqueue, owned, wait_for
):
    followed = make("follow")
    with (
        running(make("member"), "consumers", "executor"),
        running(followed, "consumers"),
        running(followed, "executor", sidecar=True),
    ):
        wait_for(
            lambda: owned() == {"member": 2, "follow": 2},
            timeout=40,
            what="both have their partitions",
        )
        with heard("loop.failed") as failed:
            broker.kill()
            # A group that was silent for a session may have moved on.
            wait_for(
                lambda: owned() == {"member": 0, "follow": 0},
                timeout=30,
                what="both have given their origins back",
            )
            enqueue("follow")
            enqueue("member")
            loops = {fields["loop"].split()[0] for _, fields in failed}
            assert "follow" in loops
        assert not ran
        broker.start()
        wait_for(
            lambda: sorted(ran) == ["follow", "member"], timeout=60, what="both go on"
        )
