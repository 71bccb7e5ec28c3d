"""Re-exports that send nothing now keep no other one back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib import reexport
from tests.support.apps import count, make_app, running
from tests.support.records import read_topic
from tests.support.reexports import write_reexport

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.expects("fenced"), pytest.mark.timeout(300)]

SLOW = 12
"""Entities beside the one that must leave."""
ROWS = 600
"""Rows of the re-export that must leave, about six seconds of its rate."""
SEEN = 30
"""Rows that have left when it is paused in the middle."""
CHUNK = 100
"""The most that the status is behind the topic."""


@pytest.fixture
def warehouse(database_url, bootstrap_servers, topic):
    """An app with many entities that share a topic; it polls seldom."""
    app = make_app(
        database_url,
        kafka_bootstrap_servers=bootstrap_servers,
        relay_poll_interval=0.25,
    )
    states = app.topic(topic(4), value=int, compacted=True)
    for name in ["fast", *(f"slow{n}" for n in range(SLOW))]:
        app.entity(states, source=name, key="id", name=name)(
            lambda _connection, keys: dict.fromkeys(keys, 1)
        )
    return app


@pytest.fixture
def wait_for(wait_for):
    """The function that waits; each look makes a connection, or a client of Kafka."""
    return partial(wait_for, every=0.1)


@pytest.fixture
def write(admin, warehouse) -> Callable[..., int]:
    """A function that begins a re-export whose rows wait in the outbox."""
    (states,) = warehouse.topics.values()

    def write(name: str, rows: int, shards: int, *, state="running", rate=1) -> int:
        return write_reexport(
            admin,
            states.name,
            name,
            rows,
            rate=rate,
            shards=shards,
            state=state,
            keys=name,
        )

    return write


def left_of(admin: Any, number: int) -> int:
    """Count the rows of a re-export that wait in the outbox."""
    return count(admin, f"outbox where reexport_id = {number}")


@pytest.mark.guarantee("W28", "W33", "X7", "X8")
@pytest.mark.parametrize("shards", [1, 16])
@pytest.mark.parametrize("before", ["paused", "slow", "many slow"])
def test_a_re_export_leaves_at_its_rate_behind_others_that_send_nothing(
    warehouse, database, admin, bootstrap_servers, write, wait_for, before, shards
):
    state = "paused" if before == "paused" else "running"
    # In each shard they have more rows than a block.
    others = [
        write(f"slow{n}", 200 * shards, shards, state=state)
        for n in range(SLOW if before == "many slow" else 1)
    ]
    write("fast", ROWS, shards, rate=6_000)
    with running(warehouse, "relay"):
        wait_for(
            lambda: reexport.status(database, "fast").state == "finished",
            timeout=120,
            what=lambda: f"it ends: {reexport.status(database, 'fast')}",
        )
    for number in others:
        # Two minutes are the longest that the test waits.
        assert left_of(admin, number) >= 200 * shards - 3 * (state == "running")
    (states,) = warehouse.topics.values()
    sent = [record.key for record in read_topic(bootstrap_servers, states.name)]
    assert sorted(key for key in sent if key.startswith("fast-")) == sorted(
        f"fast-{n}" for n in range(1, ROWS + 1)
    )


@pytest.mark.guarantee("X8", "X12")
def test_each_re_export_is_steered_by_itself_and_by_the_next_relay_too(
    warehouse, database, admin, bootstrap_servers, write, wait_for
):
    rows = 320

    def await_end(name: str) -> None:
        wait_for(
            lambda: reexport.status(database, name).state == "finished",
            timeout=60,
            what=lambda: f"it ends: {reexport.status(database, name)}",
        )

    slow, paused, cancelled = (write(f"slow{n}", rows, 16) for n in range(3))
    for name in ("slow1", "slow2"):
        reexport.pause(database, name)
    with running(warehouse, "relay"):
        reexport.set_rate(database, "slow0", 60_000)
        await_end("slow0")
        assert left_of(admin, slow) == 0
        assert left_of(admin, paused) == left_of(admin, cancelled) == rows
    with running(warehouse, "relay"):
        reexport.cancel(database, "slow2")
        wait_for(
            lambda: left_of(admin, cancelled) == 0,
            timeout=60,
            what="rows of the cancelled one go",
        )
        assert left_of(admin, paused) == rows
        reexport.set_rate(database, "slow1", 60_000)
        reexport.resume(database, "slow1")
        await_end("slow1")
    (states,) = warehouse.topics.values()
    sent = [record.key for record in read_topic(bootstrap_servers, states.name)]
    assert sorted(sent) == sorted(
        f"{name}-{n}" for name in ("slow0", "slow1") for n in range(1, rows + 1)
    )


@pytest.mark.guarantee("X8")
def test_the_status_tells_how_many_of_its_records_the_topic_has(
    warehouse, database, admin, bootstrap_servers, connect, write, wait_for
):
    (states,) = warehouse.topics.values()

    def read_sent() -> int:
        return reexport.status(database, "fast").sent

    def count_records() -> int:
        records = read_topic(bootstrap_servers, states.name)
        return sum(one.headers["ce_cause"] == "reexport" for one in records)

    write("fast", ROWS, 16, rate=1_200)
    with connect() as connection:
        states.send(connection, key="live", value=1)
    with running(warehouse, "relay"):
        wait_for(lambda: read_sent() >= SEEN, timeout=60, what="some are sent")
        # It counts nothing that is not there yet.
        told = read_sent()
        assert told <= count_records()
        paused = reexport.pause(database, "fast")
        # A block may still be under way.
        wait_for(
            lambda: count_records() == read_sent(),
            timeout=30,
            what=lambda: f"{read_sent()} of {count_records()} are told",
        )
    sent = read_sent()
    assert SEEN <= sent < ROWS
    assert sent == count_records()
    assert sent - paused.sent <= CHUNK
    assert left_of(admin, paused.id) == ROWS - sent
