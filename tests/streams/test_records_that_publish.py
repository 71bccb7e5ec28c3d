"""A handler publishes by its record: an event for each key, whenever it is handled."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest

from jobs_lib import ConfigurationError
from jobs_lib.consuming.record import build_record
from jobs_lib.operating.rewinds import rewind
from tests.support.apps import heard, running
from tests.support.processes.processors import TENANTS, declare_forwarding
from tests.support.processes.publishers import STEPS
from tests.support.records import produce

RECORD_STEPS = [
    *STEPS,
    "records.applied",  # Kafka has the event, and the record's block is not committed
    "records.committed",
]
QUICKLY = {"sent"}
"""The step that is tried every day."""
SAYS = {"same": lambda n: 0, "other": lambda n: n}
"""By key, what a record says when it is handled for the nth time."""


@pytest.fixture
def target(own_broker) -> str:
    """The topic of what handlers publish."""
    return own_broker.create(2)


@pytest.mark.expects("fenced", "loop.failed")
@pytest.mark.guarantee("T11", "T16")
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=() if step in QUICKLY else pytest.mark.slow)
        for step in RECORD_STEPS
    ],
)
def test_a_record_has_one_event_wherever_the_process_dies(
    start_process, database_url, own_broker, make, admin, name, target, read_log,
    wait_for, step,
):  # fmt: skip
    admin.execute(TENANTS)
    servers = own_broker.bootstrap_servers
    produce(servers, name, [("t1", {"n": 1})])
    start_process(
        "forwards",
        database_url,
        kafka_bootstrap_servers=servers,
        source=name,
        target=target,
        **({"step": step} if step in STEPS else {"dies_at": {step: 1}}),
    ).wait()
    # No change without its event.
    forwarded = admin.execute("select id from tenants").fetchall()
    assert bool(forwarded) == (step == "records.committed")
    assert read_log(target) or step in ("remembered", "sent")
    admin.execute("update jobs_lib.requests set sent_until = clock_timestamp()")
    app = make(publish_timeout=2, stale_after=5.0)
    declare_forwarding(app, name, target)
    produce(servers, name, [("t2", {"n": 2})])
    with running(app, "consumers"):
        find = "select id from tenants order by id"
        wait_for(
            lambda: admin.execute(find).fetchall() == [("t1",), ("t2",)],
            timeout=60,
            what="both are handled",
        )
    made = sorted((one.key, one.json["n"]) for one in read_log(target))
    assert made == [("t1", 1), ("t2", 2)]


@pytest.mark.expects("origins.lost", "fenced")
@pytest.mark.guarantee("T11", "T16")
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_record_that_is_handled_again_sends_only_what_is_new(
    make, own_broker, database, name, target, read_log, await_read, is_async
):
    app = make()
    outcomes = app.stream(target)
    begun: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    offsets: dict[str, list[int | None]] = {}

    def choose(record) -> tuple[dict[str, int], list[str]]:
        begun[record.key] += 1
        state = {"says": SAYS[record.key](begun[record.key])}
        return state, [f"{record.key}-1", f"{record.key}-2"]

    def end(record, published) -> None:
        for one in published:
            offsets.setdefault(one.key, []).append(one.offset)
        if begun[record.key] == 1:
            raise ValueError("a fault behind the events")
        ended[record.key] += 1

    def handle(record, conn) -> None:
        state, keys = choose(record)
        end(record, [outcomes.publish(key, state, by=record) for key in keys])

    async def handle_async(record, conn) -> None:
        state, keys = choose(record)
        publish = outcomes.publish_async
        end(record, [await publish(key, state, by=record) for key in keys])

    app.consumer(name, group=name)(handle_async if is_async else handle)
    servers = own_broker.bootstrap_servers
    for key in SAYS:
        produce(servers, name, [(key, {})], headers={"ce_request": key})

    def read(key: str) -> list[int]:
        return [one.json["says"] for one in read_log(target, key)]

    with heard("record.failed") as failed, running(app, "consumers"):
        await_read(name, name)
        assert (len(failed), ended) == (2, {"same": 1, "other": 1})
        # Each key has an event of its own, which an equal one is not sent behind.
        assert [read(f"same-{n}") for n in (1, 2)] == [[0], [0]]
        assert [read(f"other-{n}") for n in (1, 2)] == [[1, 2], [1, 2]]
        # The same event once more in the topic, and all of the topic once more.
        produce(servers, name, [("same", {})], headers={"ce_request": "same"})
        await_read(name, name)
        rewind(database, name, name, {0: 0, 1: 0})
        await_read(name, name)
        assert ended == {"same": 4, "other": 2}
    assert [read(f"same-{n}") for n in (1, 2)] == [[0], [0]]
    assert [read(f"other-{n}") for n in (1, 2)] == [[1, 2, 3], [1, 2, 3]]
    # The answers name the event that is there.
    assert all(len({*offsets[f"same-{n}"]}) == 1 for n in (1, 2))


def test_a_record_with_an_id_beside_it_or_without_acknowledgement_is_refused(
    make, own_broker, name, read_log
):
    app = make()
    record = build_record(name, 0, 0, "t1", {}, {}, datetime.now(UTC))
    unheard = own_broker.create(1)
    refusals: list[tuple[Any, dict[str, Any], str]] = [
        (app.stream(name), {"request": "r1"}, "leave `request` out"),
        (app.stream(unheard, acks=0), {}, "has acks=0"),
    ]
    for stream, more, says in refusals:
        with pytest.raises(ConfigurationError, match=says):
            stream.publish("t1", {}, by=record, **more)
        with pytest.raises(ConfigurationError, match=says):
            asyncio.run(stream.publish_async("t1", {}, by=record, **more))
    assert read_log(name) == read_log(unheard) == []
