"""A topic gets more partitions while records come and jobs wait."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

from jobs_lib.errors import TopicError
from jobs_lib.operating.home_topic import repartition
from tests.support.apps import make_app, running
from tests.support.records import make_producer

if TYPE_CHECKING:
    from jobs_lib import Job

BEFORE, AFTER = 6, 12
KEYS = [f"key-{n}" for n in range(20)]


@pytest.fixture
def home(topic):
    """A topic of six partitions."""
    return topic(BEFORE)


@pytest.fixture
def make(database_url, bootstrap_servers, home):
    """A function that makes the app of a pod: each record becomes a job of its key."""

    def make(pod: str):
        app = make_app(
            database_url,
            home=home,
            pod=pod,
            kafka_bootstrap_servers=bootstrap_servers,
            kafka={"topic.metadata.refresh.interval.ms": "500"},
        )

        @app.job(group="key")
        def work(job: Job, key: str, n: int) -> None:
            with job.transaction() as connection:
                connection.execute("insert into effects values (%s, %s)", (key, n))

        @app.consumer(home, group=f"{home}-g")
        def handle(record, connection) -> None:
            work.enqueue(connection, key=record.key, n=record.value)

        return app

    return make


@pytest.fixture
def done(admin):
    """A function that counts the jobs that have run."""
    admin.execute(
        "create table effects (key text, n int,"
        " place bigint generated always as identity)"
    )
    return lambda: admin.execute("select count(*) from effects").fetchone()[0]


@pytest.fixture
def send(bootstrap_servers, home, done):
    """Send records as fast as they are handled; a function ends this and counts."""
    counts = dict.fromkeys(KEYS, 0)
    stop = threading.Event()

    def produce() -> None:
        producer = make_producer(bootstrap_servers)
        while not stop.wait(0.005):
            # However slow the machine is, this ends soon after the last record.
            for key in KEYS if sum(counts.values()) - done() < 500 else ():
                # A producer that does not know the new partitions sends each key where
                # it went before.
                partition = KEYS.index(key) % BEFORE
                value = json.dumps(counts[key])
                producer.produce(home, value, key, partition=partition)
                counts[key] += 1
        producer.flush()

    thread = threading.Thread(target=produce)
    thread.start()

    def end() -> dict[str, int]:
        stop.set()
        thread.join()
        return counts

    yield end
    end()


@pytest.mark.expects("jobs.fenced", "loop.failed", "origins.lost")
@pytest.mark.guarantee("J28", "FK8")
def test_more_partitions_under_load_have_owners_and_groups_stay_in_order(
    make, home, admin, done, send, kafka_admin, wait_for
):
    def owned(role: str) -> set[str]:
        rows = admin.execute(
            "select o.origin from jobs_lib.origins o"
            " join jobs_lib.processes p on p.id = o.owner where o.role = %s",
            (role,),
        )
        return {row[0] for row in rows}

    first = make("pod-a")
    with running(first, "consumers", "executor"):
        with running(make("pod-b"), "consumers", "executor"):
            wait_for(lambda: done() > 200, timeout=90, what="jobs run")
            with pytest.raises(TopicError, match=f"has {BEFORE} partitions in Kafka"):
                repartition(first, AFTER)
            created = kafka_admin.create_partitions([NewPartitions(home, AFTER)])
            created[home].result()
            every = {f"{home}/{n}" for n in range(AFTER)}
            wait_for(
                lambda: owned("execute") == owned(f"consume:{home}-g") == every,
                timeout=90,
                what=lambda: f"each origin has an owner: {owned('execute')}",
            )
            repartition(first, AFTER)
            begun = done()
            wait_for(lambda: done() > begun + 200, timeout=90, what="jobs go on")
            counts = send()
            wait_for(
                lambda: done() == sum(counts.values()), timeout=90, what="all have run"
            )
        assert not admin.execute("select from jobs_lib.jobs").rowcount
    for key, sent in counts.items():
        rows = admin.execute(
            "select n from effects where key = %s order by place", (key,)
        )
        assert [row[0] for row in rows] == list(range(sent))
