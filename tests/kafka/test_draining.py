"""After a fault, what waited drains: the consumer's lag, the jobs and the outbox."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.apps import count, heard, make_app, running
from tests.support.outbox.judge import read_id
from tests.support.records import produce, read_committed, read_topic
from tests.support.waiting import linger

if TYPE_CHECKING:
    from jobs_lib import Job

RECORDS = 50
"""Before, during and after each fault."""
PARTITIONS = 2
QUICK: dict[str, Any] = {
    "database_timeout": 1,
    "heartbeat_interval": 0.5,
    "session_timeout": 6,
}


@pytest.fixture
def chain(database_url, database_proxy, own_broker):
    """A service behind proxies: a record makes a job, and the job an event.

    It is given as the app, the topic of records, and that of events.
    """
    source, target = (own_broker.create(PARTITIONS) for _ in range(2))
    app = make_app(
        database_proxy.url(database_url),
        home=source,
        kafka_bootstrap_servers=own_broker.proxied,
        **QUICK,
    )
    events = app.topic(target, value=int)

    @app.job(group="key")
    def publish(job: Job, key: str, n: int) -> None:
        with job.transaction() as connection:
            events.send(connection, key=key, value=n)

    @app.consumer(source, group=f"{source}-g", value=int)
    def handle(record, connection) -> None:
        publish.enqueue(connection, key=record.key, n=record.value)

    return app, source, events


def count_reads(told: list[tuple[str, dict[str, Any]]]) -> Counter[int]:
    """Count how often the relay has read each row.

    It reads a row again only after a failure: the commit or the delete of its block got
    no answer.
    """
    reads: Counter[int] = Counter()
    failures = 0
    at: dict[int, int] = {}
    for event, fields in told:
        if event == "loop.failed":
            failures += 1
            continue
        for row in fields["rows"]:
            assert at.get(row, -1) < failures, f"row {row} is read again: {told[-20:]}"
            at[row] = failures
            reads[row] += 1
    return reads


@pytest.mark.guarantee("I37")
@pytest.mark.timeout(400)
@pytest.mark.expects("loop.failed", "fenced")
def test_after_each_fault_of_a_server_lag_jobs_and_outbox_come_to_nothing(
    chain, own_broker, database_proxy, connect, admin, wait_for
):
    app, source, events = chain
    servers = own_broker.bootstrap_servers
    numbers = itertools.count()
    produced = 0

    def write() -> None:
        """Produce records, past the proxy."""
        nonlocal produced
        found = list(itertools.islice(numbers, RECORDS))
        produce(servers, source, [(f"k{n % 7}", n) for n in found])
        produced += RECORDS

    def find_waiting() -> dict[str, int]:
        done = read_committed(servers, f"{source}-g", source) or {}
        return {
            "lag": produced - sum(done.values()),
            "jobs": count(admin, "jobs"),
            "outbox": count(admin, "outbox"),
        }

    def await_nothing(since: str) -> None:
        wait_for(
            lambda: not any(find_waiting().values()),
            timeout=120,
            what=lambda: f"all drains {since}: {find_waiting()}",
            # Each look makes a client of Kafka.
            every=0.2,
        )

    def send() -> None:
        """Send an event that cannot leave now."""
        with connect() as connection:
            events.send(connection, key="held", value=next(numbers))

    def lose_kafka() -> None:
        own_broker.proxy.hold()
        send()
        write()
        linger(2.0)
        assert count(admin, "outbox where key = 'held'") == 1
        own_broker.proxy.release()

    def kill_kafka() -> None:
        with own_broker.down():
            send()

    def lose_database() -> None:
        with heard("loop.failed") as failed:
            database_proxy.hold()
            write()
            wait_for(lambda: failed, timeout=60, what="the database is missed")
        database_proxy.release()

    with heard("block.read", "loop.failed") as told, running(app):
        write()
        await_nothing("at the beginning")
        for fault in (lose_kafka, kill_kafka, lose_database):
            write()
            fault()
            write()
            await_nothing(f"after {fault.__name__}")
    found = read_topic(servers, events.name)
    assert {record.json for record in found} == {*range(next(numbers))}
    reads = count_reads(told)
    sent = Counter(read_id(record) for record in found)
    assert not {row: (n, reads[row]) for row, n in sent.items() if n > reads[row]}
