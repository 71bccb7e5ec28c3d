"""All pods lose Kafka, while PostgreSQL is there."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka.admin import AdminClient

from jobs_lib.devstack import KafkaBroker
from tests.support import create_topic
from tests.support.apps import heard, make_app, running

TOPICS = {"member": "of-members", "follow": "of-followers"}


@pytest.mark.slow
@pytest.mark.expects("loop.failed", "origins.lost")
@pytest.mark.guarantee("FK7")
def test_executors_that_lose_kafka_stop_in_time_and_go_on_when_it_is_back(
    database_url, admin, wait_for
):
    ran: list[str] = []
    lock = threading.Lock()

    def owned(kind: str) -> int:
        return admin.execute(
            "select count(*) from jobs_lib.origins"
            " where role = 'execute' and owner is not null and origin like %s || '/%%'",
            (TOPICS[kind],),
        ).fetchone()[0]

    def enqueue(kind: str) -> None:
        admin.execute(
            "insert into jobs_lib.jobs (origin, type, payload) values (%s, %s, '{}')",
            (f"{TOPICS[kind]}/0", kind),
        )

    with KafkaBroker.ephemeral() as broker:
        client = AdminClient({"bootstrap.servers": broker.bootstrap_servers})

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

        followed = make("follow")
        with (
            running(make("member"), "consumers", "executor"),
            running(followed, "consumers"),
            running(followed, "executor", sidecar=True),
        ):
            wait_for(
                lambda: owned("member") == owned("follow") == 2,
                timeout=40,
                what="both have their partitions",
            )
            with heard("loop.failed") as failed:
                broker.kill()
                # A group that was silent for a session may have moved on.
                wait_for(
                    lambda: owned("member") == owned("follow") == 0,
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
                lambda: sorted(ran) == ["follow", "member"],
                timeout=60,
                what="both go on",
            )
