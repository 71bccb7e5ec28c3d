"""A DataFrame as the source of a re-export, from its files to the topic."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from jobs_lib import join_key, reexport
from jobs_lib.cli.reexport import reexport as commands
from jobs_lib.errors import ReexportError
from spark_bridge import FrameSource, master, start, start_stale, workers
from spark_bridge.frame_engine import check_topic
from spark_bridge.frames import _join_key, number_rows, open_frame, plan_frame
from spark_bridge.staging import KEY, RANGE
from tests.support.apps import count, make_app, running
from tests.support.commands import make_runner
from tests.support.records import read_topic

pytestmark = [pytest.mark.spark, pytest.mark.expects("fenced")]


@dataclass
class Plane:
    """The state of an aircraft."""

    tail: str
    seats: int
    version: int


@pytest.fixture
def fleet(database_url, bootstrap_servers, topic):
    """An app with an entity; its table is elsewhere."""
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    name = topic(4, config={"cleanup.policy": "compact"})
    planes = app.topic(name, value=Plane, compacted=True, partitions=4)
    app.entity(planes, source="nothing", key="tail", name="planes")(lambda _, __: {})
    return app


def make_frame(spark, rows, schema="tail string, seats int, version int"):
    return FrameSource(lambda _: spark.createDataFrame(rows, schema))


def examine(spark, fleet, source, ranges=None):
    entity = fleet.entities["planes"]
    return plan_frame(spark, open_frame(spark, source, entity), entity, ranges)


def begin_and_load(database, fleet, source, **options):
    entity = fleet.entities["planes"]
    return start(database, entity, rate=1_000_000, frame=source, **options)


def await_end(database, admin, wait_for):
    wait_for(
        lambda: (
            reexport.status(database, "planes").ended
            and not count(admin, "outbox")
            and not count(admin, "jobs")
        ),
        timeout=60,
        what=lambda: f"all is sent: {reexport.status(database, 'planes')}",
    )
    return reexport.status(database, "planes")


def newest_of(records):
    return {one.key: (one.json["seats"], one.json["version"]) for one in records}


@pytest.mark.guarantee("X4", "X11", "I34")
@pytest.mark.parametrize(
    "kind", ["parquet", pytest.param("csv", marks=pytest.mark.slow)]
)
def test_files_reach_the_topic_where_it_has_no_newer_version(
    spark, fleet, database, admin, connect, bootstrap_servers, wait_for, tmp_path, kind
):
    (planes,) = fleet.topics.values()
    # The newest of two versions counts.
    rows = [(f"N{n}", n, 5) for n in range(300)] + [("N7", 7_000, 6), ("N8", 80, 4)]
    frame = spark.createDataFrame(rows, "tail string, seats int, version long")
    path = str(tmp_path / "planes")
    if kind == "csv":
        frame.write.csv(path, header=True)
    else:
        frame.write.parquet(path)
    source = getattr(FrameSource, kind)(path)

    def send(connection, key, version):
        value = Plane(key, -version, version)
        planes.send(connection, key=key, value=value)
        connection.commit()

    with connect() as connection, running(fleet, "executor", "relay"):
        for key, version in (("N1", 4), ("N2", 5), ("N3", 9)):
            send(connection, key, version)
        planes.tombstone(connection, key="N4", version=6)
        connection.commit()
        wait_for(lambda: not count(admin, "outbox"), what="the topic has a history")

        def go_on_live(progress):
            if not progress.loaded:
                # The re-export has begun, and no state is read yet.
                send(connection, "N5", 8)
                send(connection, "N6", 3)

        begin_and_load(database, fleet, source, ranges=5, on_progress=go_on_live)
        progress = await_end(database, admin, wait_for)
    # N2, N3 and N4 are in the topic, and N5 was sent meanwhile.
    assert (progress.total, progress.superseded) == (300, 4)
    assert progress.ranges == 5
    records = read_topic(bootstrap_servers, planes.name)
    states = [one for one in records if one.value is not None]
    expected = {f"N{n}": (n, 5) for n in range(300)}
    expected |= {"N7": (7_000, 6), "N2": (-5, 5), "N3": (-9, 9), "N5": (-8, 8)}
    del expected["N4"]
    assert newest_of(states) == expected
    assert [one.value for one in records if one.key == "N4"] == [None]
    for one in states:
        assert one.headers["ce_version"] == str(one.json["version"])
    versions: dict[str, int] = {}
    for one in records:
        version = int(one.headers["ce_version"])
        assert version >= versions.get(one.key, 0), one.key
        versions[one.key] = version


@pytest.mark.guarantee("W32", "X6")
def test_an_interrupted_start_goes_on_with_the_ranges_that_are_missing(
    spark, fleet, database, admin
):
    source = make_frame(spark, [(f"N{n}", n, 1) for n in range(100)])
    admin.execute("create sequence failures")
    # Each range fails once, at its commit: Spark tries its task again.
    admin.execute("""
        create function fail() returns trigger language plpgsql as $$ begin
            if nextval('failures') <= 2 then raise 'killed before the commit'; end if;
            return null;
        end $$;
        create constraint trigger killed after update on jobs_lib.reexport_ranges
        deferrable initially deferred for each row execute function fail();
    """)
    admin.commit()

    class Interrupted(Exception): ...

    def stop(progress):
        if progress.loaded_ranges:
            raise Interrupted

    with pytest.raises(Interrupted):
        # One range in the first wave.
        begin_and_load(database, fleet, source, ranges=4, ahead=30, on_progress=stop)
    before = admin.execute(
        "select range, loaded_at from jobs_lib.reexport_ranges"
        " where loaded_at is not null"
    ).fetchall()
    assert len(before) == 1
    progress = begin_and_load(database, fleet, source)
    assert (progress.state, progress.loaded, progress.ranges) == ("running", 100, 4)
    after = admin.execute("select range, loaded_at from jobs_lib.reexport_ranges")
    assert {*before} <= {*after.fetchall()}
    keys = admin.execute(
        "select k from jobs_lib.jobs, jsonb_array_elements_text(payload->'keys') k"
    ).fetchall()
    assert sorted(key for (key,) in keys) == sorted(f"N{n}" for n in range(100))
    assert count(admin, "reexport_states") == 100
    again = begin_and_load(database, fleet, source)
    assert (again.id, again.loaded) == (progress.id, 100)


@pytest.mark.parametrize("kind", ["string", "int"])
def test_ranges_have_equal_sizes_whatever_the_skew(spark, fleet, kind):
    # Most keys lie close together, and one of them has most of the rows.
    keys = [*range(-50, 900), *(10**6 + n * 1_000 for n in range(50))]
    rows = [(str(key) if kind == "string" else key, 1, 1) for key in keys]
    rows += [(rows[0][0], 1, version) for version in range(2, 1_500)]
    source = make_frame(spark, rows, f"tail {kind}, seats int, version int")
    if kind == "int":
        fleet.topics.clear()
        items = fleet.topic("numbers", value=dict[str, int], compacted=True)
        fleet.entities.clear()
        fleet.entity(items, source="n", key="tail", name="planes")(lambda _, __: {})
    planned = examine(spark, fleet, source, 10)
    assert sum(piece.keys for piece in planned) == 1_000
    assert 5 <= len(planned) <= 10
    assert max(piece.keys for piece in planned) <= 200
    assert planned[0].lower is None
    assert planned[-1].upper is None
    assert [piece.upper for piece in planned[:-1]] == [
        piece.lower for piece in planned[1:]
    ]
    frame = open_frame(spark, source, fleet.entities["planes"]).select(KEY).distinct()
    numbered = number_rows(spark, frame, [*enumerate(planned)]).groupBy(RANGE).count()
    assert {row[RANGE]: row["count"] for row in numbered.collect()} == {
        number: piece.keys for number, piece in enumerate(planned)
    }
    some = [(n, planned[n]) for n in (1, 3)]
    assert number_rows(spark, frame, some).count() == sum(p.keys for _, p in some)


BAD = {
    "no key column": ([(1, 1)], "seats int, version int", "no column 'tail'"),
    "no version": ([("N1", 1)], "tail string, seats int", "no column 'version'"),
    "no state": ([("N1", 1)], "tail string, version int", "1 states .* do not fit"),
    "twice the same column": (
        [("N1", "N2", 1)], "tail string, TAIL string, version int", "the same name",
    ),
    "a null key": (
        [(None, 1, 1), ("N1", 1, 1)], None, "1 rows of .* have no key",
    ),
    "an empty key": ([("", 1, 1)], None, "1 rows of .* have an empty key"),
    "a long key": ([("é" * 501, 1, 1)], None, "more than 1,000 bytes"),
    "a key with NUL": ([("a\0b", 1, 1)], None, "a key with NUL"),
    "a key without order": (
        [({"a": 1}, 1, 1)], "tail map<string,int>, seats int, version int",
        "of type map",
    ),
    "a key without one text": (
        [(1.5, 1, 1)], "tail double, seats int, version int", "of type double",
    ),
    "twice the same": ([("N1", 1, 1), ("N1", 1, 1)], None, "1 keys with two states"),
    "two of one version": (
        [("N1", 1, 1), ("N1", 2, 1)], None, "1 keys with two states of one version",
    ),
    "a version below 0": (
        [("N1", 1, -1)], None, "1 rows of .* no whole number of 64 bits from 0 on"
    ),
    "a null version": ([("N1", 1, None)], None, "no whole number of 64 bits"),
    "a version that is no number": (
        [("N1", 1, "first")], "tail string, seats int, version string",
        "1 rows of .* no whole number",
    ),
    "a version that is no whole number": (
        [("N1", 1, 1.5)], "tail string, seats int, version double", "of type double",
    ),
    "a version that is too large": (
        [("N1", 1, "9223372036854775808")], "tail string, seats int, version string",
        "1 rows of .* no whole number",
    ),
    "a state that does not fit": (
        [("N1", "secret", 1), ("N2", "7", 1)],
        "tail string, seats string, version int",
        r"1 states of the DataFrame do not fit .* in range 0 of 1: .*seats",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_frame_is_refused_without_its_values(spark, fleet, fault):
    rows, schema, told = BAD[fault]
    source = make_frame(spark, rows, schema or "tail string, seats int, version int")
    with pytest.raises(ReexportError, match=told) as caught:
        examine(spark, fleet, source)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_nothing_begins_with_a_bad_frame(spark, fleet, database, admin):
    source = make_frame(spark, [("N1", 1, None)])
    with pytest.raises(ReexportError, match="no whole number of 64 bits"):
        begin_and_load(database, fleet, source)
    assert count(admin, "reexports") == count(admin, "jobs") == 0


@pytest.mark.guarantee("X15")
def test_nothing_begins_where_a_secret_of_kafka_would_cross_a_network(
    spark, fleet, database, admin, monkeypatch
):
    entity = fleet.entities["planes"]
    settings = fleet.settings.model_copy(update={"kafka": {"sasl.password": "canary"}})
    monkeypatch.setattr(type(entity.topic), "settings", settings)
    monkeypatch.setattr(master, "is_here", lambda _: False)
    # The database's own would be refused first.
    monkeypatch.setattr(master, "has_password", lambda _: False)
    frame = make_frame(spark, [("N1", 1, 1)])
    for begin in (
        lambda: begin_and_load(database, fleet, frame),
        lambda: start_stale(database, settings, entity, rate=60),
    ):
        with pytest.raises(ReexportError, match="JOBS_LIB_KAFKA holds a secret"):
            begin()
        assert count(admin, "reexports") == 0


@pytest.mark.slow
def test_a_start_ends_when_no_executor_is_there_for_too_long(
    spark, fleet, database, admin, monkeypatch, tmp_path
):
    slow = tmp_path / "slow"
    source = make_slow_frame(str(slow))
    monkeypatch.setattr(workers, "count_executors", lambda _: 0)
    monkeypatch.setattr(workers, "_LOOK_EVERY", 0.05)

    def begin_to_wait(_=None):
        slow.touch()
        monkeypatch.setattr(workers, "PATIENCE", 0.2)

    with pytest.raises(ReexportError, match=r"no executor for 0\.2 s"):
        # It has begun, and the states are to be loaded.
        begin_and_load(database, fleet, source, on_progress=begin_to_wait)
    assert count(admin, "reexports") == 1
    with pytest.raises(ReexportError, match=r"no executor for 0\.2 s"):
        examine(spark, fleet, source)


def make_slow_frame(slow):
    """A frame whose task waits as soon as there is a file of this name."""
    columns = "tail string, seats int, version int"

    def give(batches):
        import pathlib
        import time

        yield from batches
        if pathlib.Path(slow).exists():
            time.sleep(2)

    return FrameSource(
        lambda spark: spark.createDataFrame([("N1", 1, 1)], columns).mapInArrow(
            give, columns
        )
    )


def test_files_that_are_not_there_are_named(spark, fleet, database, admin):
    for source in (FrameSource.parquet("/no/such"), FrameSource.csv("/no/such")):
        with pytest.raises(ReexportError, match=r"cannot be read: .*/no/such") as told:
            begin_and_load(database, fleet, source)
        assert "\n" not in str(told.value)
    with pytest.raises(ReexportError, match="only Spark reads"):
        begin_and_load(database, fleet, source, engine="sql")
    assert count(admin, "reexports") == 0


def test_a_topic_that_cannot_tell_the_newest_is_refused(
    fleet, topic, database_url, bootstrap_servers
):
    check_topic(fleet.entities["planes"])
    plain = fleet.topic("untyped", compacted=True)
    fleet.entity(plain, source="nothing", key="tail", name="untyped")(lambda _, __: {})
    with pytest.raises(ReexportError, match="have no version"):
        check_topic(fleet.entities["untyped"])
    cut = fleet.topic(
        topic(1, config={"cleanup.policy": "delete"}), value=Plane, compacted=True
    )
    fleet.entity(cut, source="nothing", key="tail", name="cut")(lambda _, __: {})
    with pytest.raises(ReexportError, match="is not compacted"):
        check_topic(fleet.entities["cut"])
    alone = make_app(database_url, kafka_bootstrap_servers="")
    planes = alone.topic("planes", value=Plane, compacted=True)
    alone.entity(planes, source="nothing", key="tail", name="planes")(lambda _, __: {})
    with pytest.raises(ReexportError, match="Kafka is not known"):
        check_topic(alone.entities["planes"])


@pytest.mark.guarantee("X4")
def test_a_plan_examines_the_files_and_changes_nothing(
    spark, fleet, admin, tmp_path, monkeypatch
):
    run = make_runner(commands, fleet, monkeypatch)
    path = str(tmp_path / "planes")
    rows = [(f"N{n}", n, 5) for n in range(300)] + [("N7", 7_000, 6)]
    spark.createDataFrame(rows, "tail string, seats int, version long").write.parquet(
        path
    )
    told = run(*f"plan planes --parquet {path} --rate 100 --ranges 3".split())
    assert "300 keys of the DataFrame (tail) to test-" in told
    assert "in 3 ranges" in told
    assert "at 100 records a minute it takes 3.1 minutes" in told
    assert "nothing was changed" in told
    assert "reexport stale" not in told
    dry = run(*f"start planes --parquet {path} --rate 100 --dry-run --json".split())
    plan = json.loads(dry)
    assert plan["total"] == 300
    assert len(plan["ranges"]) == 1
    bad = str(tmp_path / "bad")
    twice = [("N1", 1, 1), ("N1", 2, 1)]
    spark.createDataFrame(twice, "tail string, seats int, version long").write.csv(
        bad, header=True
    )
    for command in ("plan planes", "start planes --dry-run"):
        with pytest.raises(ReexportError, match="two states of one version"):
            run(*f"{command} --csv {bad} --rate 100".split())
    for table in ("reexports", "jobs", "reexport_ranges"):
        assert count(admin, table) == 0


@dataclass
class Leg:
    """The state of a flight's leg, whose key has two columns."""

    carrier: str
    number: int
    seats: int
    version: int


LEGS = "carrier string, number int, seats int, version int"


@pytest.fixture
def legs(database_url, bootstrap_servers, topic):
    """An app with an entity whose key has two columns."""
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    name = topic(4, config={"cleanup.policy": "compact"})
    declared = app.topic(name, value=Leg, compacted=True, partitions=4)
    key = ("carrier", "number")
    app.entity(declared, source="nothing", key=key, name="legs")(lambda _, __: {})
    return app


@pytest.mark.guarantee("X2", "X4")
def test_a_key_of_several_columns_arrives_with_its_version_and_state(
    spark, legs, database, admin, bootstrap_servers, wait_for
):
    (topic,) = legs.topics.values()
    # Only both columns together are unique, and in their order.
    odd = ['a"b', "a,b", "\\", "ключ", "1", ""]
    rows = [(carrier, n, n * 10, 2) for carrier in odd for n in (-1, 1, 11)]
    rows += [("1", 1, 77, 3)]
    newer = join_key("1", 11)
    with database.connect("test") as connection, connection.transaction():
        topic.send(connection, key=newer, value=Leg("1", 11, 0, 9))
    with running(legs, "executor", "relay"):
        wait_for(lambda: not count(admin, "outbox"), what="the topic has a newer one")
        start(
            database,
            legs.entities["legs"],
            rate=1_000_000,
            frame=make_frame(spark, rows, LEGS),
            ranges=3,
        )
        wait_for(
            lambda: reexport.status(database, "legs").ended,
            timeout=60,
            what=lambda: f"all is sent: {reexport.status(database, 'legs')}",
        )
    progress = reexport.status(database, "legs")
    assert (progress.total, progress.superseded, progress.ranges) == (18, 1, 3)
    found = {
        one.key: (one.json, one.headers["ce_version"])
        for one in read_topic(bootstrap_servers, topic.name)
    }
    expected = {
        join_key(carrier, n): (
            {"carrier": carrier, "number": n, "seats": seats, "version": version},
            str(version),
        )
        for carrier, n, seats, version in [*rows, ("1", 11, 0, 9)]
    }
    assert found == expected
    assert len(found) == 18


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([("UA", 1, 1, 1), ("UA", 1, 2, 1)], "1 keys with two states of one version"),
        ([("UA", None, 1, 1), (None, 1, 1, 1), ("UA", 1, 1, 1)], "2 rows .* no key"),
        ([("U" * 999, 1, 1, 1)], "1 rows .* more than 1,000 bytes"),
    ],
)
def test_bad_keys_of_several_columns_are_refused(spark, legs, rows, told):
    entity = legs.entities["legs"]
    frame = open_frame(spark, make_frame(spark, rows, LEGS), entity)
    with pytest.raises(ReexportError, match=told):
        plan_frame(spark, frame, entity)


def test_the_parts_of_a_key_are_joined_as_everywhere():
    assert _join_key("UA", "1545") == join_key("UA", 1545)
    assert _join_key("UA", None) is None
    assert _join_key(None, "1") is None
    assert _join_key("", "1") == join_key("", "1")
