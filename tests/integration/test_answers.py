"""Answers from a read model: how current they are, and how to read one's own writes."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import text

from jobs_lib import AnswerError, EntityState
from jobs_lib.consuming.answer_steps import ModelVersion, ValidSince
from jobs_lib.consuming.versions import name_model
from jobs_lib.service.maintenance import Maintenance
from tests.integration.test_callers import (
    WAYS,
    async_engine_of,
    engine_of,
    psycopg_serializable,
    settle,
)
from tests.support.apps import count, make_app

NOON = datetime(2026, 11, 24, 12, tzinfo=UTC)
JFK, LAX = {"airport": "JFK"}, {"airport": "LAX"}
KEPT = 3_600.0
FOREVER = 30.0
"""Seconds: a wait for what comes."""


@pytest.fixture(params=["row", "side"])
def versions(request):
    """Where the read model has its versions."""
    return request.param


@pytest.fixture
def table(admin):
    """The table of the read model."""
    admin.execute(
        "create table aircraft_rm (tail text primary key, version bigint, airport text)"
    )


@pytest.fixture
def declare(database_url, table):
    """A function that makes one more pod: an app, and the answers of its read model."""
    apps = []

    def declare(versions="row", **settings):
        app = make_app(database_url, answer_seconds=KEPT, **settings)
        apps.append(app)

        @app.read_model(
            "states", table="aircraft_rm", key="tail", group="g", versions=versions
        )
        def aircraft_rm(record): ...

        return app, app.answers(aircraft_rm)

    yield declare
    for app in apps:
        app.close()


@pytest.fixture
def pod(declare):
    """A pod whose read model has the versions on its rows."""
    return declare()


@pytest.fixture
def reach(admin):
    """A function that lets the read model have a version of a key, or its end."""

    def reach(key, version, *, gone=False, versions="row"):
        admin.execute("delete from aircraft_rm where tail = %s", (key,))
        if not gone:
            admin.execute(
                "insert into aircraft_rm values (%s, %s, 'JFK')", (key, version)
            )
        if gone or versions == "side":
            admin.execute(
                "insert into jobs_lib.model_keys as k (model, key, version, is_gone)"
                " values ('aircraft_rm', %s, %s, %s) on conflict (model, key)"
                " do update set version = excluded.version, is_gone = excluded.is_gone",
                (key, version, gone),
            )

    return reach


@pytest.fixture
def read_up_to(admin):
    """A function that says how far the consumer is in a partition."""

    def read_up_to(partition, offset, at, topic_id=None):
        admin.execute(
            "insert into jobs_lib.offsets as o (consumer_group, topic, partition,"
            " next_offset, appended_at, topic_id)"
            " values ('g', 'states', %s, %s, %s, %s)"
            " on conflict (consumer_group, topic, partition) do update set"
            " next_offset = excluded.next_offset, appended_at = excluded.appended_at",
            (partition, offset, at, topic_id),
        )

    return read_up_to


def list_keys(admin):
    rows = admin.execute("select key from jobs_lib.answers order by key").fetchall()
    return [key for (key,) in rows]


def make_older(admin, seconds):
    admin.execute(
        "update jobs_lib.answers set put_at = put_at - make_interval(secs => %s)",
        (seconds,),
    )


# How current an answer is


@pytest.mark.guarantee("W73")
def test_an_answer_is_valid_since_the_partition_that_is_furthest_behind(
    pod, read_up_to
):
    app, aircraft = pod
    assert aircraft.valid_since(app) == ValidSince(None, {})
    for partition in range(3):
        read_up_to(partition, 10 * partition, NOON - timedelta(minutes=partition))
    offsets = {0: 0, 1: 10, 2: 20}
    earliest = NOON - timedelta(minutes=2)
    assert aircraft.valid_since(app) == ValidSince(earliest, offsets)
    # Murmur2 puts this key into the partition 1 of three.
    of_key = aircraft.valid_since(app, key="N3")
    assert of_key == ValidSince(NOON - timedelta(minutes=1), {1: 10})


@pytest.mark.guarantee("W73")
@pytest.mark.parametrize(("offset", "at"), [(None, NOON), (7, None)])
def test_nobody_knows_the_time_while_a_partition_has_none(pod, read_up_to, offset, at):
    app, aircraft = pod
    read_up_to(0, 4, NOON)
    # Of an earlier topic of this name, or as an operator has set the offset.
    read_up_to(1, offset, at)
    assert aircraft.valid_since(app) == ValidSince(None, {0: 4, 1: offset})


@pytest.mark.guarantee("W73")
def test_a_partition_that_the_topic_has_no_more_does_not_count(pod, read_up_to):
    app, aircraft = pod
    old, new = UUID(int=1), UUID(int=2)
    read_up_to(0, 4, NOON, new)
    read_up_to(1, 9, NOON - timedelta(days=1), old)
    assert aircraft.valid_since(app) == ValidSince(NOON, {0: 4})


# To wait for a version


@pytest.mark.guarantee("W74")
@pytest.mark.parametrize("has", [17, 18])
@pytest.mark.parametrize("gone", [False, True], ids=["a row", "an end"])
def test_the_version_or_a_newer_one_ends_the_wait(declare, reach, versions, has, gone):
    app, aircraft = declare(versions)
    reach("N1", 16, versions=versions)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(
            aircraft.wait_for, app, key="N1", version=17, timeout=FOREVER
        )
        assert aircraft.wait_for(app, key="N1", version=17, timeout=0) is None
        assert not waiting.done()
        reach("N1", has, gone=gone, versions=versions)
        assert waiting.result() == ModelVersion(has, gone)


@pytest.mark.guarantee("W74")
def test_a_key_that_came_back_is_not_gone(pod, reach):
    app, aircraft = pod
    reach("N1", 16, gone=True)
    reach("N1", 17)
    found = aircraft.wait_for(app, key="N1", version=15, timeout=0)
    assert found == ModelVersion(17, is_gone=False)


@pytest.mark.guarantee("W74")
def test_a_version_that_does_not_come_in_time_is_none(pod, reach):
    app, aircraft = pod
    reach("N1", 16)
    began = time.monotonic()
    assert aircraft.wait_for(app, key="N1", version=17, timeout=0.2) is None
    assert time.monotonic() - began >= 0.2


@pytest.mark.guarantee("W74")
@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_a_transaction_that_sees_no_change_is_refused_and_goes_on(
    pod, reach, connect, level
):
    _, aircraft = pod
    reach("N1", 17)
    connection = connect()
    connection.isolation_level = psycopg.IsolationLevel[level]
    connection.execute("create table kept (id int)")
    # Also where the version is there already: it is a mistake.
    with pytest.raises(AnswerError, match=r"is (REPEATABLE READ|SERIALIZABLE), and"):
        aircraft.wait_for(connection, key="N1", version=17)
    found = aircraft.wait_for(connection, key="N1", version=17, timeout=0)
    assert found == ModelVersion(17, is_gone=False)
    connection.execute("insert into kept values (1)")
    connection.commit()


@pytest.mark.guarantee("W74")
def test_who_waits_with_the_app_holds_no_connection(declare, reach):
    app, aircraft = declare(transactions=1)
    with ThreadPoolExecutor() as threads:
        waiting = [
            threads.submit(aircraft.wait_for, app, key="N1", version=1, timeout=FOREVER)
            for _ in range(5)
        ]
        for _ in range(5):
            with app.transaction() as connection:
                assert connection.execute("select 1").fetchone() == (1,)
        assert not any(one.done() for one in waiting)
        reach("N1", 1)
        assert {one.result() for one in waiting} == {ModelVersion(1, is_gone=False)}


@pytest.mark.guarantee("W74")
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "alone"])
def test_an_async_wait_pauses_on_the_event_loop(
    declare, database_url, driver, monkeypatch
):
    app, aircraft = declare()
    slept, sleep = [], asyncio.sleep

    async def note(seconds, *given):
        slept.append(seconds)
        return await sleep(seconds, *given)

    monkeypatch.setattr(asyncio, "sleep", note)

    async def work():
        if driver == "alone":
            async with await psycopg.AsyncConnection.connect(
                database_url, autocommit=True
            ) as connection:
                await wait(connection)
            return
        async with (
            async_engine_of(app, driver) as engine,
            engine.connect() as connection,
        ):
            await wait(connection)

    async def wait(connection):
        waiting = asyncio.create_task(
            aircraft.wait_for(connection, key="N1", version=1, timeout=FOREVER)
        )
        async with await psycopg.AsyncConnection.connect(database_url) as other:
            await other.execute("insert into aircraft_rm values ('N1', 1, 'JFK')")
            async with asyncio.timeout(FOREVER):
                while len(slept) < 2:
                    await sleep(0)
            assert not waiting.done()
            await other.commit()
        assert await waiting == ModelVersion(1, is_gone=False)

    asyncio.run(work())
    assert slept[0] < slept[1]
    assert max(slept) <= 0.1


# To keep what an update has returned


@pytest.mark.guarantee("W74")
def test_another_pod_answers_with_the_entity_until_the_read_model_has_its_version(
    declare, reach, versions, connect
):
    app, aircraft = declare(versions)
    other, its_aircraft = declare(versions)
    reach("N1", 16, versions=versions)
    reach("N2", 3, versions=versions)
    assert aircraft.put(app, key="N1", version=17, entity=LAX)
    assert aircraft.put(app, key="N3", version=1, entity=JFK)
    assert aircraft.put(app, key="N2", version=4, entity=None)
    reader = connect(autocommit=True, row_factory=dict_row)

    def search():
        newer = its_aircraft.newer(other)
        rows = reader.execute("select tail, airport from aircraft_rm").fetchall()
        merged = its_aircraft.merge(rows, newer, belongs=lambda row: True)
        return {row["tail"]: row["airport"] for row in merged}

    assert search() == {"N1": "LAX", "N3": "JFK"}
    # The rows that the consumer writes are at JFK.
    reach("N1", 17, versions=versions)
    assert search() == {"N1": "JFK", "N3": "JFK"}
    reach("N3", 2, gone=True, versions=versions)
    reach("N2", 4, gone=True, versions=versions)
    assert search() == {"N1": "JFK"}
    assert its_aircraft.newer(other) == []


@pytest.mark.guarantee("W74")
def test_an_older_version_never_replaces_a_newer_entry(pod):
    app, aircraft = pod
    assert aircraft.put(app, key="N1", version=17, entity=LAX)
    for version in (16, 17):
        assert not aircraft.put(app, key="N1", version=version, entity=JFK)
    assert aircraft.newer(app) == [EntityState("N1", 17, LAX)]
    assert aircraft.put(app, key="N1", version=18, entity=None)
    assert not aircraft.put(app, key="N1", version=17, entity=LAX)
    assert aircraft.newer(app) == [EntityState("N1", 18, None)]


@pytest.mark.guarantee("W74")
def test_an_entity_that_was_given_along_counts_as_one_that_was_kept(pod, reach):
    app, aircraft = pod
    aircraft.put(app, key="N1", version=17, entity=LAX)
    given = [
        EntityState("N1", 18, JFK),
        EntityState("N2", 5, LAX),
        EntityState("N3", 1, None),
    ]
    reach("N2", 5)
    assert aircraft.newer(app, given=given) == [given[0], given[2]]
    older = [EntityState("N1", 16, JFK)]
    assert aircraft.newer(app, given=older) == [EntityState("N1", 17, LAX)]


@pytest.mark.guarantee("W74")
def test_a_rolled_back_put_leaves_nothing(pod, connect):
    app, aircraft = pod
    connection = connect()
    aircraft.put(connection, key="N1", version=17, entity=LAX)
    assert aircraft.newer(app) == []
    connection.rollback()
    assert aircraft.newer(app) == []


@pytest.mark.guarantee("W74")
def test_an_entity_of_any_json_comes_back_as_it_was(pod):
    app, aircraft = pod
    entity = {"a\0": ["ü", None, 1.5, {"b": "\ud800"}], "n": 2**80, "t": True}
    aircraft.put(app, key="ü'\"\\%s{}", version=0, entity=entity)
    state = EntityState("ü'\"\\%s{}", 0, entity)
    assert aircraft.newer(app, given=[]) == [state]


# When an entry goes


@pytest.mark.guarantee("W74")
def test_an_entry_outlives_its_seconds_until_the_read_model_has_caught_up(
    pod, read_up_to, admin
):
    app, aircraft = pod
    aircraft.put(app, key="N1", version=17, entity=LAX)
    now = datetime.now(UTC)
    read_up_to(0, 1, now + timedelta(hours=1))
    read_up_to(1, 1, now)
    read_up_to(2, None, None)
    make_older(admin, KEPT / 2)
    # It has not outlived its seconds.
    assert aircraft.newer(app)
    make_older(admin, KEPT)
    # A partition is behind the time at which it was put.
    read_up_to(1, 2, now - timedelta(seconds=2 * KEPT))
    assert aircraft.newer(app)
    read_up_to(1, 3, now)
    assert aircraft.newer(app) == []
    # One stands still at its first record.
    admin.execute("update jobs_lib.offsets set failed_offset = 0 where partition = 2")
    assert aircraft.newer(app)


@pytest.mark.guarantee("W74")
def test_a_partition_that_the_topic_has_no_more_keeps_no_entry(pod, read_up_to, admin):
    app, aircraft = pod
    aircraft.put(app, key="N1", version=17, entity=LAX)
    now = datetime.now(UTC)
    read_up_to(0, 1, now)
    read_up_to(1, 1, now - timedelta(seconds=3 * KEPT))
    make_older(admin, 2 * KEPT)
    assert aircraft.newer(app)
    # The topic was made anew, with one partition.
    admin.execute("update jobs_lib.offsets set topic_id = gen_random_uuid()")
    assert aircraft.newer(app) == []


@pytest.mark.guarantee("W74")
def test_the_upkeep_removes_entries_that_serve_nobody(
    pod, reach, read_up_to, admin, database, wait_for
):
    app, aircraft = pod
    aircraft.put(app, key="expired", version=2, entity=LAX)
    make_older(admin, 2 * KEPT)
    read_up_to(0, 1, datetime.now(UTC))
    # A put would remove the first one.
    admin.execute(
        "insert into jobs_lib.answers (model, key, version, value, bytes,"
        " consumer_group, topic) select model, key_, version, value, bytes,"
        " consumer_group, topic from jobs_lib.answers,"
        " unnest(array['reached', 'gone', 'waits']) key_"
    )
    reach("reached", 2)
    reach("gone", 3, gone=True)
    reach("waits", 1)
    models = [one.model for one in app.consumers]
    maintenance = Maintenance(database, {1}, models=models, answer_seconds=KEPT)
    maintenance.start()
    wait_for(lambda: list_keys(admin) == ["waits"], what="the others are removed")
    maintenance.stop()
    assert aircraft.newer(app) == [EntityState("waits", 2, LAX)]


def test_the_upkeep_reads_the_table_that_readers_see_just_after_a_switch(
    pod, reach, admin, database, wait_for
):
    app, aircraft = pod
    aircraft.put(app, key="reached", version=2, entity=LAX)
    reach("reached", 2)
    (declared,) = app.consumers
    # No consumer has asked for the new name yet, and no table has the old one.
    declared.place(declared.version.number + 1)
    maintenance = Maintenance(database, {1}, models=[declared.model])
    maintenance.start()
    wait_for(lambda: list_keys(admin) == [], what="the entry is removed")
    maintenance.stop()


@pytest.mark.guarantee("W74")
def test_a_put_removes_entries_that_serve_nobody(declare, reach, admin, versions):
    app, aircraft = declare(versions)
    for key in ("reached", "gone", "waits", "expired"):
        aircraft.put(app, key=key, version=2, entity=LAX)
    admin.execute(
        "update jobs_lib.answers set put_at = put_at - interval '1 day'"
        " where key = 'expired'"
    )
    reach("reached", 2, versions=versions)
    reach("gone", 3, gone=True, versions=versions)
    reach("waits", 1, versions=versions)
    aircraft.put(app, key="new", version=1, entity=LAX)
    assert list_keys(admin) == ["new", "waits"]


@pytest.mark.parametrize("bytes_", [10, 32_768], ids=["their number", "their bytes"])
def test_the_oldest_entries_go_where_they_are_too_many(pod, admin, bytes_):
    app, aircraft = pod
    most = min(1_000, 16_777_216 // bytes_)
    admin.execute(
        "insert into jobs_lib.answers select 'aircraft_rm', 'k' || n, 1, '{}', %s, 'g',"
        " 'states', clock_timestamp() - make_interval(secs => n::float / 1000)"
        " from generate_series(1, %s) n",
        (bytes_, most + 20),
    )
    aircraft.put(app, key="new", version=1, entity={"a": "b" * (bytes_ - 9)})
    left = list_keys(admin)
    assert len(left) == most
    assert {"new", "k1", f"k{most - 1}"} <= {*left}


def test_a_put_in_a_stricter_transaction_removes_nothing_and_does_not_fail(
    pod, reach, connect, admin
):
    app, aircraft = pod
    for key in ("N1", "N2"):
        aircraft.put(app, key=key, version=2, entity=LAX)
    reach("N1", 2)
    connection = connect()
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.execute("select 1")
    admin.execute("delete from jobs_lib.answers where key = 'N1'")
    aircraft.put(connection, key="N3", version=2, entity=LAX)
    connection.commit()
    assert list_keys(admin) == ["N2", "N3"]


def test_puts_at_once_keep_the_newest_and_do_not_wait_for_what_others_remove(
    pod, reach, connect, admin
):
    app, aircraft = pod
    aircraft.put(app, key="N1", version=2, entity=LAX)
    reach("N1", 2)
    # This transaction is removing the entry that every put would remove.
    remover = connect()
    aircraft.put(remover, key="N2", version=1, entity=LAX)
    with ThreadPoolExecutor() as threads:
        puts = [
            threads.submit(aircraft.put, app, key="N3", version=n, entity={"n": n})
            for n in range(20)
        ]
        assert any(put.result(timeout=FOREVER) for put in puts)
    remover.commit()
    assert list_keys(admin) == ["N2", "N3"]
    assert EntityState("N3", 19, {"n": 19}) in aircraft.newer(app)


# On every kind of connection


@pytest.mark.guarantee("W73", "W74")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_kind_of_connection_can_ask_and_keep(pod, reach, read_up_to, admin, way):
    app, aircraft = pod
    reach("N1", 16)
    read_up_to(0, 7, NOON)

    async def work():
        async with way(app) as hand:
            caller = hand.caller
            timeout = 0 if way is psycopg_serializable else 0.01
            wait = aircraft.wait_for(caller, key="N1", version=16, timeout=timeout)
            assert await settle(wait) == ModelVersion(16, is_gone=False)
            wait = aircraft.wait_for(caller, key="N1", version=17, timeout=timeout)
            assert await settle(wait) is None
            found = await settle(aircraft.valid_since(caller, key="N1"))
            assert found == ValidSince(NOON, {0: 7})
            entity = {"airport": "ünal:1 %s"}
            put = aircraft.put(caller, key="N1", version=17, entity=entity)
            assert await settle(put) is True
            gone = EntityState("N2", 1, None)
            newer = await settle(aircraft.newer(caller, given=[gone]))
            assert newer == [EntityState("N1", 17, entity), gone]

    asyncio.run(work())
    assert count(admin, "answers") == 1


@pytest.mark.guarantee("W74")
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_no_transaction_is_needed(pod, connect, admin, driver):
    app, aircraft = pod
    callers = [connect(autocommit=True), app]
    with (
        engine_of(app, driver, isolation_level="AUTOCOMMIT") as engine,
        engine.connect() as connection,
    ):
        for version, caller in enumerate([*callers, connection]):
            assert aircraft.put(caller, key="N1", version=version, entity={})
            assert aircraft.newer(caller) == [EntityState("N1", version, {})]
            assert count(admin, "answers") == 1
            found = aircraft.wait_for(caller, key="N1", version=0, timeout=0.01)
            assert found is None
        assert connection.execute(text("select 1")).scalar() == 1


@pytest.mark.guarantee("W73")
@pytest.mark.parametrize("table", ["seat_rm", "seat", "cabin.seat_rm", "seat_rm_rm"])
@pytest.mark.parametrize("seen", [1, 2, 10])
def test_answers_find_the_keys_of_the_version_that_readers_see(
    admin, database_url, table, seen
):
    app = make_app(database_url)
    app.read_model("seats", table=table, key="id", group="g", versions="side")(
        lambda record: {}
    )
    for version in (1, 2, 10):
        admin.execute(
            "insert into jobs_lib.read_models"
            " (model, version, tables, consumer_group, topic, is_current)"
            " values (%s, %s, %s, 'g', 'seats', %s)",
            (table, version, [table], version == seen),
        )
        admin.execute(
            "insert into jobs_lib.model_keys (model, key, version)"
            " values (%s, '7', %s)",
            (name_model(table, version), version),
        )
    known = app.answers(table).wait_for(app, key="7", version=0, timeout=0)
    assert known == ModelVersion(seen, is_gone=True)
    app.close()
