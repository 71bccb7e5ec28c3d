"""The topic of the example gets more partitions while requests come over HTTP."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice

import pytest

from examples.tenants.client import TenantsClient
from examples.tenants.tenants import derive_id
from jobs_lib.partitioner import choose_partition
from tests.support.tenants import APP, TOPIC, Stage, make_form

BEFORE, AFTER = 6, 8


def find_key(name: str) -> str:
    """The id of the tenant with such a name."""
    return derive_id(f"{name}@example.org")


def moves(name: str) -> bool:
    """Whether the tenant gets a partition that is not there before."""
    return choose_partition(find_key(name), AFTER) >= BEFORE


NAMES = [*islice(filter(moves, (f"t{n}" for n in count())), 6)]


@pytest.fixture(scope="module")
def stage(make_stage) -> Stage:
    """API, processor and provider, each a process of its own."""
    made = make_stage(
        publish_timeout=3.0, kafka='{"topic.metadata.refresh.interval.ms": "500"}'
    )
    made.start_provider()
    made.start_api()
    made.start_processor()
    return made


def change(stage: Stage, name: str, stopping: threading.Event) -> int:
    """Create a tenant, and change it until it is to stop; returns how often."""
    number = 0
    with TenantsClient(stage.address) as client:
        key = client.create(make_form(name))["id"]
        while not stopping.is_set():
            number += 1
            form = make_form(name, name=str(number))
            assert client.put(key, form)["name"] == str(number)
    return number


@pytest.mark.slow
@pytest.mark.expects("fenced")
@pytest.mark.guarantee("T20")
def test_each_tenant_keeps_its_order_while_its_topic_grows(stage, wait_for):
    stopping = threading.Event()

    def find_partitions() -> set[int]:
        return {event.partition for event in stage.read_log()}

    with ThreadPoolExecutor(len(NAMES)) as pool:
        calls = [pool.submit(change, stage, name, stopping) for name in NAMES]
        try:
            wait_for(
                lambda: len(stage.read_log()) > 10 * len(NAMES),
                timeout=90,
                what=lambda: f"requests come\n{stage.output}",
            )
            stage.run("topics", "grow", APP, TOPIC, "--partitions", str(AFTER))
            moved = {choose_partition(find_key(name), AFTER) for name in NAMES}
            wait_for(
                lambda: moved <= find_partitions(),
                timeout=90,
                what=lambda: f"requests come\n{stage.output}",
            )
        finally:
            stopping.set()
        numbers = [call.result() for call in calls]
    stage.await_table()
    stage.await_registrations()
    table = stage.read_table()
    for name, number in zip(NAMES, numbers, strict=True):
        key = find_key(name)
        events = sorted(stage.read_log(key), key=lambda one: (one.at, one.offset))
        # Each answer is one event.
        names = ["Ada", *map(str, range(1, number + 1))]
        assert [event.json["name"] for event in events] == names
        # None follows in the old partition once the new one has the tenant's events.
        places = [event.partition for event in events]
        old, new = (choose_partition(key, n) for n in (BEFORE, AFTER))
        assert places == sorted(places, key=[old, new].index)
        assert table[key]["name"] == str(number)
    assert sorted(stage.read_registrations()) == sorted(map(find_key, NAMES))
