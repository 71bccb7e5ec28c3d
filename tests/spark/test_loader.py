"""Spark loads each key once, however often it tries."""

from __future__ import annotations

import psycopg
import pytest

from jobs_lib import reexport
from jobs_lib.partitioner import choose_origin
from jobs_lib.postgres.database import Database
from jobs_lib.reexport.snapshot import hold_snapshot
from spark_bridge import SparkEngine, start
from spark_bridge.loader import RESULT, Target, load_with_spark, make_task
from tests.reexport.helpers import (
    loaded_keys,
    make_entity,
    make_table,
    origins_of_keys,
    query,
)

KEYS = [f"N{n:05}" for n in range(5_000)]

# Fails three times, in any process: a sequence keeps its count when its transaction is
# rolled back.
FAILING = """
    create sequence failures;
    create function fail() returns trigger language plpgsql as $$ begin
        if nextval('failures') <= 3 then raise 'killed'; end if;
        return null;
    end $$;
"""
WHEN = {
    "before the first row": (
        "create trigger killed before insert on jobs_lib.jobs"
        " for each statement execute function fail()"
    ),
    "behind the last row": (
        "create trigger killed after insert on jobs_lib.jobs"
        " for each statement execute function fail()"
    ),
    "at the commit": (
        "create constraint trigger killed after update on jobs_lib.reexport_ranges"
        " deferrable initially deferred for each row execute function fail()"
    ),
}


@pytest.fixture
def begun(database):
    make_table(database, KEYS)
    return reexport.begin(database, make_entity(), rate=6_000, ranges=10)


def test_all_ranges_are_loaded_in_parallel(spark, database, begun):
    with SparkEngine() as engine:
        progress = reexport.load(database, begun, engine)
    assert (progress.state, progress.loaded) == ("running", 5_000)
    assert loaded_keys(database) == KEYS
    # The session existed before, so it stays.
    assert spark.range(3).count() == 3


@pytest.mark.guarantee("X5")
def test_tasks_put_each_key_into_its_own_origin(spark, database, begun):
    target = Target(database.url, database.schema)
    assert load_with_spark(spark, target, begun.loading, range(10)) == 5_000
    assert origins_of_keys(database) == {
        key: choose_origin(key, "local", 16) for key in KEYS
    }


@pytest.mark.guarantee("X6")
def test_a_second_run_changes_nothing(spark, database, begun):
    target = Target(database.url, database.schema)
    assert load_with_spark(spark, target, begun.loading, range(10)) == 5_000
    assert load_with_spark(spark, target, begun.loading, range(10)) == 0
    assert load_with_spark(spark, target, begun.loading, []) == 0
    assert loaded_keys(database) == KEYS


@pytest.mark.guarantee("X6", "I33")
@pytest.mark.parametrize("when", WHEN)
def test_tasks_that_fail_before_their_commit_are_tried_again(
    spark, database, begun, when
):
    with database.connect("test") as connection:
        connection.execute(FAILING)
        connection.execute(WHEN[when])
    target = Target(database.url, database.schema)
    assert load_with_spark(spark, target, begun.loading, range(10)) == 5_000
    assert query(database, "select last_value from failures") == [(13,)]
    assert loaded_keys(database) == KEYS


@pytest.mark.guarantee("X6")
def test_tasks_that_fail_after_their_commit_load_nothing_twice(spark, database, begun):
    task = make_task(Target(database.url, database.schema), begun.loading, range(10))

    def dies_after_the_commit(batches):
        from pyspark import TaskContext

        yield from task(batches)
        if TaskContext.get().attemptNumber() == 0:
            raise RuntimeError("killed after the commit")

    places = spark.range(0, 10, 1, 3)
    returned = places.mapInArrow(dies_after_the_commit, RESULT).collect()
    # The second attempts do not report ranges that the first ones have loaded.
    assert returned == []
    assert reexport.status(database, "aircraft").loaded == 5_000
    assert loaded_keys(database) == KEYS


@pytest.mark.guarantee("X6", "I33")
def test_two_tasks_at_once_for_each_range_load_it_once(spark, database, begun):
    # As Spark begins a second task beside one that it takes for slow.
    places = spark.range(0, 10, 1, 1)
    task = make_task(Target(database.url, database.schema), begun.loading, range(10))
    returned = places.union(places).mapInArrow(task, RESULT).collect()
    assert sorted(row["range"] for row in returned) == [*range(10)]
    assert sum(row["keys"] for row in returned) == 5_000
    assert loaded_keys(database) == KEYS


@pytest.mark.guarantee("X3")
def test_tasks_read_the_snapshot_that_the_driver_holds(spark, database, begun):
    with hold_snapshot(database, begun, 600) as held:
        query(database, "delete from aircraft where tail < 'N02' returning 1")
        query(database, "insert into aircraft values ('N9') returning 1")
        target = Target(database.url, database.schema)
        assert load_with_spark(spark, target, held.loading, range(10)) == 5_000
    assert loaded_keys(database) == KEYS


@pytest.mark.guarantee("W32", "I35")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "engine", ["sql", pytest.param("spark", marks=pytest.mark.slow)]
)
def test_a_killed_driver_is_resumed_at_its_last_range(
    database, run_process, wait_for, request, engine
):
    # This covers the loading; the relay's tests show that nothing is sent twice.
    if engine == "spark":
        request.getfixturevalue("spark")
    make_table(database, KEYS)
    with database.connect("test") as connection:
        # This makes the load slow enough to be killed in its middle.
        connection.execute("""
            create function slow() returns trigger language plpgsql as
            $$ begin perform pg_sleep(0.1); return new; end $$;
            create trigger slow before update on jobs_lib.reexport_ranges
            for each row execute function slow();
        """)
    worker = run_process("-m", "tests.spark.driver", database.url, engine)

    def loaded_ranges():
        text = "select count(loaded_at) from jobs_lib.reexport_ranges"
        return query(database, text)[0][0]

    wait_for(
        lambda: loaded_ranges() >= 5 or not worker.running,
        # Spark starts in more than a minute beside others.
        timeout=250,
        what=lambda: f"five ranges are loaded\n{worker.output}",
    )
    worker.kill()
    interrupted = query(
        database,
        "select id, range, loaded_at from"
        " jobs_lib.reexport_ranges join jobs_lib.reexports x"
        " on x.id = reexport_id where loaded_at is not null",
    )
    assert 5 <= len(interrupted) < 40
    before = reexport.status(database, "aircraft")
    assert before.state == "loading"

    progress = start(database, make_entity(), rate=9_000, engine=engine)
    assert (progress.id, progress.state) == (before.id, "running")
    assert (progress.rate, progress.loaded) == (9_000, 5_000)
    assert loaded_keys(database) == KEYS
    # Ranges that were loaded before were not loaded again.
    after = query(
        database, "select reexport_id, range, loaded_at from jobs_lib.reexport_ranges"
    )
    assert set(interrupted) <= set(after)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_is_let_go_while_it_waits_and_started_again(
    database, run_process, wait_for
):
    make_table(database, KEYS)
    # Half of the keys may wait. Nothing sends them, so the driver waits for the test.
    arguments = (database.url, "spark", "2500", "1")
    worker = run_process("-m", "tests.spark.driver", *arguments)
    wait_for(
        lambda: "20 ranges, no Spark" in worker.output or not worker.running,
        timeout=250,
        what=lambda: f"Spark is let go\n{worker.output}",
    )
    assert "20 ranges, Spark" in worker.output
    query(database, "update jobs_lib.reexports set sent = 2500 returning 1")
    wait_for(
        lambda: "40 ranges, Spark" in worker.output or not worker.running,
        timeout=250,
        what=lambda: f"Spark has loaded the rest\n{worker.output}",
    )
    wait_for(lambda: not worker.running, timeout=60, what="the driver ends")
    assert "running 5000" in worker.output, worker.output
    assert loaded_keys(database) == KEYS


def test_a_session_that_was_given_stays_and_no_task_waits_in_it(spark, database, begun):
    seen = []

    def look(progress):
        if not progress.loaded:
            return
        seen.append(list(spark.sparkContext.statusTracker().getActiveJobsIds()))
        if len(seen) == 3:
            query(database, "update jobs_lib.reexports set sent = 2500 returning 1")

    with SparkEngine(keep=0) as engine:
        progress = reexport.load(database, begun, engine, 2_500, look)
    # Three times while it waits, then before the second wave and at the end.
    assert seen == [[]] * 5
    assert (progress.state, progress.loaded) == ("running", 5_000)
    assert loaded_keys(database) == KEYS
    assert spark.range(3).count() == 3


def test_no_password_reaches_the_event_log(spark, event_log, database):
    url = database.url
    password = str(psycopg.conninfo.conninfo_to_dict(url)["password"])
    secret = Database(url, database.schema)
    make_table(database, KEYS)
    start(secret, make_entity(), rate=6_000)
    # A failed task is reported with its traceback.
    broken = reexport.begin(secret, make_entity(), rate=6_000)
    with pytest.raises(Exception, match="has no range 77"):
        load_with_spark(spark, Target(url, database.schema), broken.loading, [77])
    assert password not in repr(Target(url, database.schema))
    logs = [path.read_bytes() for path in event_log.rglob("*") if path.is_file()]
    assert any(b"SparkListenerJobEnd" in log for log in logs)
    assert any(b"has no range 77" in log for log in logs)
    assert not any(password.encode() in log for log in logs)
    assert not any(password in value for value in spark.conf.getAll.values())
