"""A record tells its cause, and whether the group has handled its place before."""

from __future__ import annotations

import pytest

from tests.support.apps import heard, running
from tests.support.records import produce


@pytest.mark.guarantee("W60")
def test_a_record_tells_its_cause_and_whether_it_comes_again(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    app = make()
    found: list[tuple[int, str | None, bool]] = []

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        found.append((record.value, record.cause, record.repeated))

    for n, cause in enumerate(["live", "reexport"]):
        headers = {"ce_cause": cause}
        produce(bootstrap_servers, name, [("k", n)], headers=headers)
    produce(bootstrap_servers, name, [("k", 2)])
    first = [(0, "live", False), (1, "reexport", False), (2, None, False)]
    again = [(1, "reexport", True), (2, None, True), (3, None, False)]
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 3}, timeout=30, what="all is in")
        assert found == first
        admin.execute("update jobs_lib.offsets set next_offset = 1")
        # While it runs, and after the next start.
        wait_for(lambda: len(found) == 5, timeout=30, what="they are handled again")
        produce(bootstrap_servers, name, [("k", 3)])
        wait_for(lambda: len(found) == 6, timeout=30, what="the new one is handled")
        wait_for(lambda: read_offsets(name) == {0: 4}, timeout=30, what="all is in")
    assert found == [*first, *again]
    found.clear()
    admin.execute("update jobs_lib.offsets set next_offset = 3")
    produce(bootstrap_servers, name, [("k", 4)])
    with running(app, "consumers"):
        wait_for(lambda: len(found) == 2, timeout=30, what="they are handled")
    assert found == [(3, None, True), (4, None, False)]


@pytest.mark.guarantee("W60")
def test_a_record_that_was_undone_is_not_one_that_comes_again(
    make, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    app = make()
    found: list[bool] = []

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        found.append(record.repeated)
        if len(found) < 3:
            raise ValueError("not yet")

    produce(bootstrap_servers, name, [("k", 1)])
    with heard("record.failed"), running(app, "consumers"):
        wait_for(lambda: len(found) == 3, timeout=30, what="it is handled")
    assert found == [False, False, False]


@pytest.mark.guarantee("W60")
def test_the_mapping_of_a_read_model_sees_that_records_come_again(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for
):
    admin.execute("create table rows (id text primary key, version bigint, n int)")
    name = topic(1)
    app = make()
    found: list[tuple[int, bool]] = []

    @app.read_model(name, table="rows", key="id", group=f"{name}-g")
    def row(record) -> dict[str, int]:
        found.append((record.value, record.repeated))
        return {"n": record.value}

    produce(bootstrap_servers, name, [("k", 1)])
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 1}, timeout=30, what="it is in")
        admin.execute("update jobs_lib.offsets set next_offset = 0")
        wait_for(lambda: len(found) == 2, timeout=30, what="it is mapped again")
    assert found == [(1, False), (1, True)]


@pytest.mark.guarantee("W60")
def test_an_offset_that_an_older_release_has_left_counts_as_handled(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    app = make()
    found: list[tuple[int, bool]] = []

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        found.append((record.value, record.repeated))

    produce(bootstrap_servers, name, [("k", n) for n in range(4)])
    admin.execute(
        "insert into jobs_lib.offsets (consumer_group, topic, partition, next_offset)"
        " values (%s, %s, 0, 3)",
        (f"{name}-g", name),
    )
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 4}, timeout=30, what="it goes on")
        admin.execute("update jobs_lib.offsets set next_offset = 1")
        wait_for(lambda: len(found) == 4, timeout=30, what="they are handled again")
    assert found == [(3, False), (1, True), (2, True), (3, True)]


@pytest.mark.guarantee("W60")
def test_the_records_of_a_topic_made_anew_do_not_count_as_handled(
    make, admin, bootstrap_servers, topic, read_offsets, make_anew, wait_for
):
    admin.execute("create table rows (id text primary key, version bigint, n int)")
    name = topic(1)
    app = make()
    found: list[tuple[int, bool]] = []

    @app.read_model(name, table="rows", key="id", group=f"{name}-g")
    def row(record) -> dict[str, int]:
        found.append((record.value, record.repeated))
        return {"n": record.value}

    produce(bootstrap_servers, name, [(f"k{n}", n) for n in range(5)])
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 5}, timeout=30, what="all is in")
    make_anew(name)
    produce(bootstrap_servers, name, [(f"k{n}", n) for n in range(10, 13)])
    found.clear()
    with heard("offset.moved"), running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 3}, timeout=30, what="it is read")
        assert found == [(10, False), (11, False), (12, False)]
        admin.execute("update jobs_lib.offsets set next_offset = 2")
        wait_for(lambda: len(found) == 4, timeout=30, what="one is mapped again")
    assert found[3] == (12, True)


@pytest.mark.guarantee("W60")
def test_after_an_operators_decision_only_what_it_passes_over_counts_as_handled(
    make, admin, bootstrap_servers, topic, read_offsets, make_anew, wait_for
):
    name = topic(1)
    app = make(heartbeat_interval=0.5, stale_after=5.0)
    found: list[tuple[int, bool]] = []

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        found.append((record.value, record.repeated))

    produce(bootstrap_servers, name, [("k", n) for n in range(5)])
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 5}, timeout=30, what="all is in")
    make_anew(name)
    produce(bootstrap_servers, name, [("k", n) for n in range(10, 13)])
    found.clear()
    with heard("topic.replaced") as replaced, running(app, "consumers"):
        wait_for(lambda: replaced, timeout=60, what="it is told")
        admin.execute("update jobs_lib.offsets set topic_id = null, next_offset = 1")
        wait_for(lambda: len(found) == 2, timeout=30, what="it goes on")
        wait_for(lambda: read_offsets(name) == {0: 3}, timeout=30, what="all is in")
        admin.execute("update jobs_lib.offsets set next_offset = 0")
        wait_for(lambda: len(found) == 5, timeout=30, what="all are handled again")
    assert found[:2] == [(11, False), (12, False)]
    assert found[2:] == [(10, True), (11, True), (12, True)]
