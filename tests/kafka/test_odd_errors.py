"""Odd errors of record handlers, of loaders, and of hooks around enqueue."""

from __future__ import annotations

import threading

import pytest

from jobs_lib.service.scheduler import Scheduler
from tests.support.apps import count, count_unsent, heard, make_app, running
from tests.support.odd import ODD, Denied, NoClass, Untold, raise_odd
from tests.support.records import produce, read_topic


@pytest.fixture
def app(database_url, bootstrap_servers):
    """An app with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)


def living(name: str) -> int:
    """Count the threads of this name."""
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


@pytest.mark.guarantee("FJ19")
def test_an_odd_error_of_a_record_stops_its_partition_until_it_is_handled(
    app, admin, bootstrap_servers, topic, wait_for
):
    name = topic(2)
    seen: list[tuple[int, str]] = []
    tried: set[str] = set()
    admin.execute("create table seen (key text)")

    @app.consumer(name, group=name)
    def handle(record, connection) -> None:
        connection.execute("insert into seen values (%s)", (record.key,))
        if record.key not in tried:
            tried.add(record.key)
            raise_odd(int(record.key))
        seen.append((record.partition, record.key))

    produce(bootstrap_servers, name, [(str(n), {}) for n in range(len(ODD))])
    with heard("record.failed", "loop.failed") as failed, running(app, "consumers"):
        wait_for(
            lambda: admin.execute("select from seen").rowcount >= len(ODD),
            timeout=60,
            what="all are handled",
        )
        assert living(f"jobs_lib consume {name}") == 2
    rows = [key for (key,) in admin.execute("select key from seen").fetchall()]
    assert sorted(rows, key=int) == [str(n) for n in range(len(ODD))]
    for partition in range(2):
        keys = [int(key) for at, key in seen if at == partition]
        assert keys == sorted(keys)
    assert {event for event, _ in failed} == {"record.failed"}


@pytest.mark.guarantee("FJ19")
def test_an_odd_error_of_a_loader_holds_its_key_and_no_other(
    app, admin, bootstrap_servers, topic, connect, wait_for
):
    states = app.topic(topic(1), value=int, compacted=True)

    @app.entity(states, source="things", key="id")
    def load(connection, keys: list[str]) -> dict[str, int]:
        for key in keys:
            if int(key) < len(ODD):
                raise_odd(int(key))
        return dict.fromkeys(keys, 7)

    with connect() as connection:
        for n in range(2 * len(ODD)):
            states.send_current(connection, key=str(n))
    with running(app, "relay"):
        threads = living("jobs_lib relay")
        wait_for(
            lambda: count_unsent(admin) == (0, len(ODD)),
            timeout=60,
            what="the others have left",
        )
        assert living("jobs_lib relay") == threads > 0
    found = {int(record.key) for record in read_topic(bootstrap_servers, states.name)}
    assert found == {*range(len(ODD), 2 * len(ODD))}
    errors = admin.execute("select error from jobs_lib.holds").fetchall()
    assert len(errors) == len(ODD)
    assert all(0 < len(error) <= 2_000 for (error,) in errors)


@pytest.mark.guarantee("FJ19")
def test_an_odd_error_of_a_hook_loses_no_tick(database_url, admin, wait_for):
    app = make_app(database_url)
    # One tick in a second. The driver itself fails for some of these errors.
    few = [Untold, NoClass, Denied, SystemExit]
    odd = iter(few)

    @app.enqueue_middleware
    def fail(draft, call_next):
        if (make := next(odd, None)) is not None:
            raise make()
        return call_next(draft)

    @app.periodic("* * * * * *")
    @app.job()
    def work(job) -> None: ...

    scheduler = Scheduler(app.database(), app.schedules.values())
    with heard("loop.failed", "ticks.enqueued") as events:
        scheduler.start()
        wait_for(
            lambda: any(event == "ticks.enqueued" for event, _ in events),
            timeout=60,
            what="a tick is in",
        )
        scheduler.stop()
    loops = [fields["loop"] for event, fields in events if event == "loop.failed"]
    assert loops == len(few) * ["schedule work"]
    # Nothing of a failed attempt is committed.
    ticks = [fields["ticks"] for event, fields in events if event == "ticks.enqueued"]
    assert count(admin, "jobs") == sum(map(len, ticks))
