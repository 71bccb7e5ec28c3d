"""A read model is made equal to its topic again, beside the running service."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID, uuid4

import psycopg
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from jobs_lib.consuming.read_model import ReadModel
from jobs_lib.consuming.resync import Resync
from jobs_lib.errors import OperatingError, UnavailableError
from jobs_lib.kafka import places
from jobs_lib.kafka.topic_settings import delete_before
from jobs_lib.operating.read_models import list_read_models
from jobs_lib.service import resync as service_resync
from jobs_lib.service.resync import begin_resync, cancel_resync, find_model_of, resync
from tests.support.apps import heard, running
from tests.support.records import make_producer
from tests.support.transactions import open_transaction

KEYS = 40


@pytest.fixture
def name(topic, bootstrap_servers):
    """A topic of two partitions: 40 keys in version 2, and one that has ended."""
    name = topic(2, config={"cleanup.policy": "compact"})
    states = [
        (f"k{n}", {"n": n, "twice": 2 * n}, version)
        for version in (1, 2)
        for n in range(KEYS)
    ]
    send(bootstrap_servers, name, [*states, ("gone", {"n": 0}, 1), ("gone", None, 2)])
    return name


def send(bootstrap_servers: str, topic: str, states, partition: int = -1) -> None:
    """Send states with their versions, each in a header; keys choose partitions."""
    producer = make_producer(bootstrap_servers)
    for key, value, version in states:
        producer.produce(
            topic,
            None if value is None else json.dumps(value).encode(),
            key,
            partition,
            headers=[("ce_version", str(version))],
        )
    assert producer.flush(30) == 0


@pytest.fixture(params=["row", "side"])
def versions(request) -> str:
    """Where the versions are."""
    return request.param


@pytest.fixture
def declare(make, admin, name, versions):
    """A function that makes an app with a read model, whose columns may change."""
    admin.execute(
        "create table model (id text primary key, version bigint, n int, twice int)"
    )

    def declare(*columns: str, **options):
        app = make(heartbeat_interval=0.5, stale_after=5.0)

        @app.read_model(
            name, table="model", key="id", group=name, versions=versions, **options
        )
        def row(record):
            return {column: record.value.get(column) for column in columns}

        return app

    return declare


@pytest.fixture
def read(admin):
    """A function that reads the rows of the model, by key."""

    def read() -> dict[str, tuple[int, int]]:
        rows = admin.execute("select id, n, twice from model").fetchall()
        return {key: (n, twice) for key, n, twice in rows}

    return read


OLD = {f"k{n}": (n, None) for n in range(KEYS)}
NEW = {f"k{n}": (n, 2 * n) for n in range(KEYS)}
LISTS = ("noted", "shown", "unshown")
"""The tables of what is known of keys meanwhile."""


@pytest.mark.guarantee("W62", "W64", "W67")
def test_a_new_column_is_filled_beside_the_running_service(
    declare, read, admin, name, versions, bootstrap_servers, read_offsets, wait_for
):
    told = []
    app = declare("n", on_change=lambda records, conn: told.extend(records))
    with running(app, "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")
        count = len(told)
        # What no record has made, and a row that is wrong.
        admin.execute("insert into model values ('orphan', 1, 7, 7)")
        admin.execute("update model set n = -1 where id = 'k3'")
        if versions == "side":
            admin.execute(
                "insert into jobs_lib.model_keys (model, key, version, is_gone)"
                " values ('model', 'orphan', 1, false)"
            )
        other = declare("n", "twice", on_change=lambda records, conn: told.append(1))
        before = read_offsets(name)
        assert resync(other, "model") == (1, True)
        assert read() == NEW
        assert len(told) == count
        send(bootstrap_servers, name, [("k1", {"n": 100}, 3)])
        wait_for(lambda: read()["k1"][0] == 100, timeout=30, what="it goes on")
        assert all(read_offsets(name)[one] >= before[one] for one in before)
    assert left_behind(admin) == []


@pytest.mark.guarantee("W62", "W64")
def test_a_change_that_it_reads_before_the_service_is_told_by_the_service(
    declare, read, admin, name, bootstrap_servers, wait_for
):
    told: list[tuple[str, int | None]] = []

    def tell(records, conn) -> None:
        told.extend((one.key, one.version) for one in records)

    def is_passed() -> bool:
        return read_places(admin, name) == find_ends(app, name)

    app = declare("n", "twice", on_change=tell)
    with running(app, "consumers"):
        wait_for(is_passed, timeout=60, what="the model is filled")
    told.clear()
    admin.execute("update model set twice = -1 where id in ('k3', 'k4')")
    changes = [("k1", {"n": 100}, 3), ("new", {"n": 7}, 1), ("k2", None, 3)]
    # A re-export with another mapping, of the version that the row has.
    again = [("k4", {"n": 4, "twice": 44}, 2)]
    send(bootstrap_servers, name, [*changes, *again])
    assert resync(declare("n", "twice", on_change=tell), "model") == (0, True)
    assert read() == {**NEW, "k4": (4, 44)}
    assert told == []
    with running(declare("n", "twice", on_change=tell), "consumers"):
        wait_for(is_passed, timeout=60, what="the service goes on")
    assert sorted(told) == [("k1", 3), ("k2", 3), ("new", 1)]
    rows = {**NEW, "k1": (100, None), "new": (7, None), "k4": (4, 44)}
    del rows["k2"]
    assert read() == rows


@pytest.mark.guarantee("W62")
def test_the_first_changes_are_told_though_it_reads_them_before_the_service(
    declare, read, admin, name, wait_for
):
    told: list[str] = []
    options = {"on_change": lambda records, conn: told.extend(r.key for r in records)}
    app = declare("n", **options)
    assert resync(app, "model") == (0, True)
    assert read() == {}
    with running(declare("n", **options), "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")
        wait_for(lambda: {*told} >= OLD.keys(), timeout=30, what="all are told")


@pytest.mark.guarantee("W62", "W64")
@pytest.mark.parametrize(
    ("move", "is_made"),
    [
        ("next_offset = 0", True),
        ("next_offset = 0, topic_id = null", False),
        ("topic_id = gen_random_uuid()", False),
    ],
    ids=["set back", "set back in a topic made anew", "topic made anew"],
)
def test_a_row_is_made_if_the_service_has_ever_passed_its_record(
    declare, read, admin, name, versions, wait_for, move, is_made
):
    app = declare("n", on_change=lambda records, conn: None)
    with running(app, "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")
    admin.execute(f"update jobs_lib.offsets set {move}")
    admin.execute("delete from model where id = 'k3'")
    if versions == "side":
        admin.execute("delete from jobs_lib.model_keys where key = 'k3'")
    assert resync(app, "model") == (0, True)
    assert ("k3" in read()) is is_made


@pytest.mark.guarantee("W58")
def test_a_gap_in_the_versions_that_it_reads_before_the_service_is_reported(
    declare, read, admin, name, bootstrap_servers, wait_for
):
    app = declare("n", gapless=True)
    with running(app, "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")
    send(bootstrap_servers, name, [("k1", {"n": 100}, 4)])
    assert resync(declare("n", gapless=True), "model") == (0, True)
    with heard("record.missing") as events, running(declare("n", gapless=True)):
        wait_for(lambda: read()["k1"] == (100, None), timeout=60, what="it goes on")
        wait_for(lambda: events, timeout=30, what="the gap is reported")
    assert [(one["before"], one["after"]) for _, one in events] == [(2, 4)]


def left_behind(admin) -> list[str]:
    """What a re-synchronisation that has ended leaves in the database."""
    queries = [
        "select model from jobs_lib.resyncs",
        *(f"select * from jobs_lib.resync_{one}" for one in LISTS),
        "select topic from jobs_lib.offsets where consumer_group like '%resync%'",
        "select origin from jobs_lib.origins where role like '%resync%'",
    ]
    return [str(row) for query in queries for row in admin.execute(query)]


@pytest.mark.parametrize("versions", ["row"], indirect=True)
def test_the_status_says_why_one_stands_still_and_it_goes_on_after_the_repair(
    declare, read, admin, wait_for
):
    app, stopping = declare("n", "seats"), threading.Event()
    ended: list[object] = []
    group = begin_resync(app, "model")
    thread = threading.Thread(
        target=lambda: ended.append(
            resync(app, "model", group=group, stopping=stopping)
        )
    )

    def find_failures() -> set[str | None]:
        return {one.resync_failure for one in list_read_models(app)}

    # The service is away, and has read nothing yet.
    admin.execute(
        "insert into jobs_lib.offsets (consumer_group, topic, partition)"
        " select topic, topic, partition from jobs_lib.offsets"
    )
    thread.start()
    try:
        wait_for(lambda: any(find_failures()), timeout=60, what="the status shows it")
        assert "lacks seats" in str(find_failures())
        admin.execute("alter table model add column seats int")
        wait_for(lambda: ended, timeout=60, what="it goes on")
    finally:
        stopping.set()
        thread.join()
    assert ended == [(0, True)]


@pytest.mark.guarantee("W64")
@pytest.mark.parametrize("versions", ["row"], indirect=True)
@pytest.mark.parametrize("part", ["all", "one partition"])
def test_records_that_are_skipped_let_it_fail_at_its_end(
    declare, read, admin, name, bootstrap_servers, part
):
    send(bootstrap_servers, name, [("odd", {"n": "no number"}, 1)] * 2, partition=0)
    admin.execute("insert into model values ('orphan', 1, 7, 7)")
    app = declare("n", on_error="skip")
    (end, _) = find_ends(app, name).values()
    told = f"2 records .* at offset {end - 2} of partition 0: .*is refused"
    if part == "all":
        for _ in range(2):
            with pytest.raises(OperatingError, match=f"^{told}.*no row was removed"):
                resync(app, "model")
        assert read() == {**OLD, "orphan": (7, 7)}
        cancel_resync(app, "model")
    else:
        with pytest.raises(OperatingError, match=f"^model was read again .*{told}"):
            resync(app, "model", end - 5, 0)
        # It has ended: the next one reads another part.
        assert resync(app, "model", 0, 1) == (0, True)
    assert left_behind(admin) == []


@pytest.mark.guarantee("W64")
def test_rows_that_change_meanwhile_stay_and_no_version_falls(
    declare, read, admin, name, versions, bootstrap_servers, wait_for
):
    app = declare("n", "twice")
    with running(app, "consumers"):
        wait_for(lambda: read() == NEW, timeout=60, what="the model is filled")
    if versions == "row":
        # They are newer than their records.
        admin.execute("update model set version = 9, n = -5 where id = 'k5'")
        admin.execute("insert into model values ('new', 1, 1, 1)")
    else:
        admin.execute("update jobs_lib.model_keys set version = 9 where key = 'k5'")
        admin.execute("update model set n = -5 where id = 'k5'")
        admin.execute("insert into model values ('new', null, 1, 1)")
        admin.execute(
            "insert into jobs_lib.model_keys (model, key, version, is_gone)"
            " values ('model', 'new', 1, false)"
        )
    other = declare("n", "twice")
    changed = threading.Event()

    def change(parts) -> None:
        # The key was noted, and has another version since.
        if not changed.is_set():
            changed.set()
            table = "model" if versions == "row" else "jobs_lib.model_keys"
            column = "id" if versions == "row" else "key"
            admin.execute(f"update {table} set version = 2 where {column} = 'new'")

    assert resync(other, "model", report=change) == (0, True)
    assert changed.is_set()
    assert read() == {**NEW, "k5": (-5, 10), "new": (1, 1)}


@pytest.mark.guarantee("W61")
def test_a_part_of_the_topic_is_read_again_and_no_row_goes(
    declare, read, admin, name, bootstrap_servers, wait_for
):
    app = declare("n")
    with running(app, "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")
        (now,) = admin.execute("select now() + interval '1 second'").fetchone()
        wait_for(
            lambda: admin.execute("select now() > %s", (now,)).fetchone() == (True,),
            timeout=10,
            what="a second is over",
        )
        send(bootstrap_servers, name, [("k1", {"n": 1, "twice": 2}, 3)])
        wait_for(
            lambda: admin.execute(
                "select 1 from jobs_lib.model_keys where version = 3"
                " union select 1 from model where version = 3"
            ).fetchone(),
            timeout=30,
            what="the change is there",
        )
        assert resync(declare("n", "twice"), "model", now) == (0, True)
    assert read() == {**OLD, "k1": (1, 2)}


@pytest.mark.guarantee("W61")
def test_records_of_one_partition_are_read_again_from_an_offset(
    declare, read, admin, name, bootstrap_servers, wait_for
):
    app = declare("n")
    with running(app, "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")
        for number, keys in enumerate(["abc", "d"]):
            states = [(key, {"n": 1, "twice": 2}, 3) for key in keys]
            send(bootstrap_servers, name, states, partition=number)
        rows = {**OLD, **dict.fromkeys("abcd", (1, None))}
        wait_for(lambda: read() == rows, timeout=30, what="they are applied")
        end = places.find_places(app.settings, name, "end")[0]
        other = declare("n", "twice")
        never = datetime(2099, 1, 1, tzinfo=UTC)
        refused: list[tuple[int | datetime, int | None, str]] = [
            (never, None, f"'{name}' has no record of 2099-01-01T00:00:00"),
            (never, 1, f"'{name}' has no record of 2099-01-01T00:00:00"),
            (end, 0, f"{name}/0 has no record from offset {end} on"),
            (0, 2, "has the partitions 0 to 1"),
            (0, None, "needs a partition"),
        ]
        for offset, partition, told in refused:
            with pytest.raises(OperatingError, match=told):
                resync(other, "model", offset, partition)
        assert left_behind(admin) == []
        assert resync(other, "model", end - 2, 0) == (0, True)
    assert read() == {**rows, "b": (1, 2), "c": (1, 2)}
    assert left_behind(admin) == []


def test_one_that_has_ended_is_not_begun_again_by_a_process_that_comes_late(
    declare, read, admin, name
):
    app = declare("n")
    group = begin_resync(app, "model")
    assert resync(app, "model", group=group) == (0, True)
    admin.execute("delete from model")
    assert resync(app, "model", group=group) == (0, False)
    assert read() == {}
    # Another one has begun meanwhile: its keys were not shown yet.
    admin.execute("insert into model values ('other', 1, 1, 1)")
    begin_resync(app, "model")
    told: list[object] = []
    late = resync(app, "model", group=group, report=told.append)
    assert (late, told) == ((0, False), [])
    assert "other" in read()


# A block may be on its way when its offsets go.
@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize("versions", ["row"], indirect=True)
def test_a_process_that_is_stopped_behind_the_end_leaves_nothing(
    declare, admin, wait_for, monkeypatch
):
    app = declare("n")
    group = begin_resync(app, "model")
    # It has not noticed the end yet.
    monkeypatch.setattr(service_resync, "_look", lambda *_: None)
    stopping = threading.Event()

    def stop() -> None:
        wait_for(lambda: left_behind(admin), timeout=60, what="it has partitions")
        stopping.set()

    waiting = threading.Thread(target=stop)

    def end(_) -> None:
        # Another process does so: this one has no partitions yet.
        admin.execute(
            "delete from jobs_lib.resyncs;"
            "delete from jobs_lib.offsets where consumer_group like '%resync%'"
        )
        waiting.start()

    assert resync(app, "model", group=group, report=end, stopping=stopping) is None
    waiting.join()
    assert left_behind(admin) == []


def test_it_goes_on_where_it_was_stopped(declare, read, admin, database, wait_for):
    app = declare("n")
    with running(app, "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")
    admin.execute("update model set n = -1")
    other = declare("n", "twice")
    assert Resync(other.settings, database, find_model_of(other, "model")).begin()
    # As if it had read all but the last two records of each partition.
    admin.execute(
        "update jobs_lib.offsets f set next_offset = p.end_offset - 2"
        " from jobs_lib.resync_parts p where p.partition = f.partition"
        " and f.consumer_group = (select consumer_group from jobs_lib.resyncs)"
    )
    admin.execute("delete from jobs_lib.resync_noted")
    admin.execute("update model set n = -1")
    assert resync(other, "model") == (0, True)
    written = {key for key, (n, _) in read().items() if n != -1}
    assert 1 <= len(written) <= 4
    assert left_behind(admin) == []


@pytest.mark.guarantee("W64")
@pytest.mark.parametrize("versions", ["row"], indirect=True)
def test_what_kafka_was_told_and_the_database_has_lost_ends_nothing(
    declare, read, admin, name, database
):
    app = declare("n")
    admin.execute("insert into model values ('k1', 1, 1, 1)")
    work = Resync(app.settings, database, find_model_of(app, "model"))
    work.begin()
    ends = places.find_places(app.settings, name, "end")
    assert [part.at for part in work.list_parts(ends)] == [0, 0]
    with pytest.raises(OperatingError, match=f"{name}/0 up to offset 0, and must"):
        work.end()
    assert "k1" in read()
    work.forget()


@pytest.mark.guarantee("W64")
@pytest.mark.parametrize("versions", ["row"], indirect=True)
def test_the_end_is_reached_if_nothing_but_markers_is_left(
    declare, admin, name, database, bootstrap_servers, monkeypatch
):
    app = declare("n")
    for end in ("commit_transaction", "abort_transaction"):
        getattr(open_transaction(bootstrap_servers, name, 2), end)(60)
        # The markers come.
        places.find_settled_ends(app.settings, name)
    work = Resync(app.settings, database, find_model_of(app, "model"))
    work.begin()
    ends = places.find_places(app.settings, name, "end")
    # The markers, and the record of the transaction that was aborted.
    handled = {number: end - 3 for number, end in ends.items()}
    move = (
        "update jobs_lib.offsets set next_offset = %s"
        " where consumer_group = %s and partition = %s"
    )
    for number, at in handled.items():
        admin.execute(move, (at, work.group, number))
    assert [part.at for part in work.list_parts()] == [*handled.values()]
    assert all(part.is_done for part in work.list_parts(ends))
    # Nothing new can appear there, so it is looked at once.
    with monkeypatch.context() as patch:
        patch.setattr("jobs_lib.consuming.resync.find_left", None)
        assert all(part.is_done for part in work.list_parts(ends))
    admin.execute(move, (handled[0] - 1, work.group, 0))
    assert [part.is_done for part in work.list_parts(ends)] == [False, True]
    admin.execute(move, (handled[0], work.group, 0))
    assert resync(app, "model") == (0, True)


@pytest.mark.guarantee("W64")
def test_a_key_that_is_shown_late_stays(
    declare, read, admin, database, versions, wait_for
):
    app = declare("n")
    with running(app, "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")
    admin.execute("insert into model values ('orphan', 1, 7, 7)")
    if versions == "side":
        admin.execute(
            "insert into jobs_lib.model_keys (model, key, version, is_gone)"
            " values ('model', 'orphan', 1, false)"
        )
    declared = find_model_of(app, "model")
    work = Resync(app.settings, database, declared)
    work.begin()
    queries, model = database.queries, {"model": "model"}
    with database.connect("test") as ending, database.connect("test") as block:
        ending.autocommit = False
        ending.execute(queries["lock_resync"], {**model, "group": work.group})
        # As another process does that has reached all ends: it finds every key.
        assert declared.model is not None
        declared.model.find_unshown(ending)
        block.execute("set lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            block.execute(queries["note_shown"], {**model, "record_key": ["k1"]})
        ending.commit()
    assert resync(app, "model") == (1, True)
    assert read() == OLD
    assert left_behind(admin) == []


def test_a_release_that_notes_keys_otherwise_begins_none(admin):
    with pytest.raises(psycopg.errors.NotNullViolation, match="notes"):
        admin.execute(
            "insert into jobs_lib.resyncs (model, topic, consumer_group, begins)"
            " values ('model', 't', 'g', 'start')"
        )


@pytest.mark.guarantee("W64")
def test_rows_stay_whose_states_were_sent_again_while_the_log_was_cut(
    declare, read, name, database, kafka_admin, bootstrap_servers, admin, wait_for
):
    app = declare("n", "twice")
    with running(app, "consumers"):
        wait_for(lambda: read() == NEW, timeout=60, what="the model is filled")
        work = Resync(app.settings, database, find_model_of(app, "model"))
        assert work.begin()
        ends = {part.partition: part.end for part in work.list_parts()}
        send(bootstrap_servers, name, AGAIN)
        wait_for(
            lambda: read_places(admin, name) == find_ends(app, name),
            timeout=30,
            what="the service has passed them",
        )
    set_policy(kafka_admin, name, "compact,delete")
    delete_before(app.settings, name, ends)
    set_policy(kafka_admin, name, "compact")
    wait_for(
        lambda: places.keeps_all_keys(app.settings, name),
        timeout=30,
        what="the broker says so",
    )
    assert resync(app, "model") == (0, True)
    assert read() == NEW
    assert left_behind(admin) == []


@pytest.mark.guarantee("W64")
def test_a_state_that_the_service_passes_before_its_row_goes_is_read_again(
    declare, read, name, versions, bootstrap_servers, admin, monkeypatch, wait_for
):
    app = declare("n", "twice")
    with running(app, "consumers"):
        wait_for(lambda: read() == NEW, timeout=60, what="the model is filled")
        for key in ("late", "orphan"):
            admin.execute("insert into model values (%s, 1, 1, 2)", (key,))
            if versions == "side":
                admin.execute(
                    "insert into jobs_lib.model_keys (model, key, version, is_gone)"
                    " values ('model', %s, 1, false)",
                    (key,),
                )
        find_unshown = ReadModel.find_unshown
        unsent = [("late", {"n": 1, "twice": 2}, 1)]

        def find(model, connection) -> None:
            find_unshown(model, connection)
            if not unsent:
                return
            # The state changes no row: the service passes it while the row is there.
            send(bootstrap_servers, name, [unsent.pop()])
            wait_for(
                lambda: read_places(admin, name) == find_ends(app, name),
                timeout=30,
                what="the service has passed it",
            )

        monkeypatch.setattr(ReadModel, "find_unshown", find)
        assert resync(app, "model") == (2, True)
        assert read() == {**NEW, "late": (1, 2)}
    assert left_behind(admin) == []


@pytest.mark.guarantee("W64")
@pytest.mark.parametrize("versions", ["row"], indirect=True)
def test_a_state_that_is_passed_before_its_row_goes_once_more_is_read_again(
    declare, read, name, bootstrap_servers, admin, monkeypatch, wait_for
):
    app, end = declare("n", "twice"), Resync.end
    unsent = ["second", "first"]

    def lose_last_commits(work: Resync):
        # The row goes in the first call, and it is there again in the second one.
        if unsent:
            key = unsent.pop()
            admin.execute("insert into model values (%s, 1, 1, 2)", (key,))
            unshown = "insert into jobs_lib.resync_unshown (model, key, version)"
            admin.execute(f"{unshown} values ('model', %s, 1)", (key,))
            # The state changes no row: the service passes it while the row is there.
            send(bootstrap_servers, name, [(key, {"n": 1, "twice": 2}, 1)])
            wait_for(
                lambda: read_places(admin, name) == find_ends(app, name),
                timeout=30,
                what="the service has passed it",
            )
        return end(work)

    with running(app, "consumers"):
        wait_for(lambda: read() == NEW, timeout=60, what="the model is filled")
        monkeypatch.setattr(Resync, "end", lose_last_commits)
        assert resync(app, "model") == (2, True)
        assert read() == {**NEW, "first": (1, 2), "second": (1, 2)}


@pytest.mark.parametrize("versions", ["row"], indirect=True)
def test_one_that_is_cancelled_leaves_nothing_of_a_process_that_was_killed(
    declare, read, admin, name
):
    app = declare("n")
    group = begin_resync(app, "model")
    admin.execute(
        "insert into jobs_lib.processes (id, pod, roles, host, pid, version)"
        " values (gen_random_uuid(), 'killed', '{}', 'h', 1, '1');"
    )
    # Of one it is known that it is dead, and of the other not yet.
    admin.execute(
        "insert into jobs_lib.origins (role, origin, owner, epoch)"
        " select 'consume:' || %(group)s, %(topic)s || '/0', id, 1"
        " from jobs_lib.processes union all"
        " select 'consume:' || %(group)s, %(topic)s || '/1', gen_random_uuid(), 1",
        {"group": group, "topic": name},
    )
    cancel_resync(app, "model")
    assert left_behind(admin) == []


AGAIN = [(f"k{n}", {"n": n, "twice": 2 * n}, 2) for n in range(KEYS)]
"""The newest states once more: they change no row."""


def find_ends(app, topic: str) -> dict[int, int]:
    return places.find_places(app.settings, topic, "end")


@pytest.mark.parametrize("versions", ["row"], indirect=True)
def test_rows_go_only_once_what_was_sent_meanwhile_is_read(
    declare, name, database, bootstrap_servers, monkeypatch
):
    app = declare("n", "twice")
    work = Resync(app.settings, database, find_model_of(app, "model"))
    assert work.begin()
    before = {part.partition: part.end for part in work.list_parts()}
    reached: dict[int, int] = {}
    unsent = [AGAIN]

    def look(work, service):
        if not unsent:
            return look_again(work, service)
        # All that lay before is read, and these are not.
        send(bootstrap_servers, name, unsent.pop())
        return [replace(part, at=part.end) for part in work.list_parts()]

    def end(self):
        reached.update({part.partition: part.at for part in self.list_parts()})
        return end_it(self)

    look_again, end_it = service_resync._look, Resync.end
    monkeypatch.setattr(service_resync, "_look", look)
    monkeypatch.setattr(Resync, "end", end)
    assert resync(app, "model") == (0, True)
    assert reached == find_ends(app, name) != before


def read_places(admin, group: str) -> dict[int, int]:
    """The offsets that a group goes on from, by partition."""
    rows = admin.execute(
        "select partition, next_offset from jobs_lib.offsets where consumer_group = %s",
        (group,),
    )
    return dict(rows.fetchall())


def set_policy(kafka_admin, topic: str, policy: str) -> None:
    """Set how a topic is cleaned up."""
    entry = ConfigEntry(
        "cleanup.policy", policy, incremental_operation=AlterConfigOpType.SET
    )
    changed = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    kafka_admin.incremental_alter_configs([changed])[changed].result()


def test_a_key_that_is_made_while_it_begins_is_no_orphan(
    declare, read, admin, name, database, bootstrap_servers, monkeypatch, wait_for
):
    app = declare("n")
    with running(app, "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")

        def find_places(settings, topic, at):
            found = places.find_places(settings, topic, at)
            if at == "end":
                send(bootstrap_servers, name, [("new", {"n": 7}, 1)])
                wait_for(lambda: "new" in read(), timeout=30, what="it is applied")
            return found

        monkeypatch.setattr("jobs_lib.consuming.resync.find_places", find_places)
        Resync(app.settings, database, find_model_of(app, "model")).begin()
    noted = admin.execute(
        "select count(*), max(key) from jobs_lib.resync_noted, unnest(keys) as key"
    )
    assert noted.fetchone() == (KEYS, "k9")


def test_rows_stay_where_the_topic_deletes_old_records(
    declare, read, admin, name, kafka_admin, caplog, wait_for
):
    app = declare("n")
    with running(app, "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")
    admin.execute("insert into model values ('orphan', 1, 7, 7)")
    set_policy(kafka_admin, name, "compact,delete")
    wait_for(
        lambda: not places.keeps_all_keys(app.settings, name),
        timeout=30,
        what="the broker says so",
    )
    assert resync(app, "model") == (0, True)
    assert read() == {**OLD, "orphan": (7, 7)}
    assert "rows whose keys it does not show stay" in caplog.text


def test_what_cannot_be_known_is_refused_and_no_row_goes(
    declare, read, admin, name, make_anew, wait_for
):
    app = declare("n")
    with running(app, "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")
    with pytest.raises(OperatingError, match=r"no read model .* its tables are: model"):
        resync(app, "other")
    stopping = threading.Event()
    stopping.set()
    assert resync(app, "model", stopping=stopping) is None
    (now,) = admin.execute("select now()").fetchone()
    for place in [(now,), (0, 0), (None, 0)]:
        with pytest.raises(OperatingError, match="reads from start has begun"):
            resync(app, "model", *place)
    admin.execute("update jobs_lib.resyncs set topic_id = gen_random_uuid()")
    with pytest.raises(OperatingError, match="was deleted and made anew"):
        resync(app, "model")
    assert read() == OLD
    cancel_resync(app, "model")
    assert left_behind(admin) == []


@pytest.mark.parametrize("versions", ["row"], indirect=True)
@pytest.mark.parametrize("begins", ["start", "offset"])
def test_it_ends_with_an_error_once_its_topic_was_made_anew(
    declare, read, name, make_anew, bootstrap_servers, monkeypatch, wait_for, begins
):
    app = declare("n")
    with running(app, "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")
    place = () if begins == "start" else (0, 0)
    begin_resync(app, "model", *place)
    # It has fewer records than the one before, and never gets to its ends.
    make_anew(name)
    send(bootstrap_servers, name, [("k1", {"n": 1}, 3)])
    monkeypatch.setattr("jobs_lib.service.resync._REPORT_SECONDS", 0.5)
    stopping = threading.Event()
    reports: list[object] = []

    def report(parts) -> None:
        reports.append(parts)
        if len(reports) > 5:
            stopping.set()

    with pytest.raises(OperatingError, match="was deleted and made anew since"):
        resync(app, "model", *place, report=report, stopping=stopping)
    assert read() == OLD
    cancel_resync(app, "model")


@pytest.mark.parametrize("versions", ["row"], indirect=True)
def test_a_topic_that_kafka_does_not_know_for_a_moment_was_not_made_anew(
    declare, read, name, admin, monkeypatch, wait_for
):
    app = declare("n")
    with running(app, "consumers"):
        wait_for(lambda: read() == OLD, timeout=60, what="the model is filled")
    admin.execute("insert into model values ('orphan', 1)")
    asked = "jobs_lib.consuming.resync.read_topic_ids"
    with monkeypatch.context() as unknown:
        unknown.setattr(asked, lambda *_: {})
        begin_resync(app, "model")
        with pytest.raises(UnavailableError, match="does not know the topic"):
            resync(app, "model")
    assert "orphan" in read()
    # Its id is known by now, so that another topic would be noticed.
    with monkeypatch.context() as replaced:
        replaced.setattr(asked, lambda *_: {name: uuid4()})
        with pytest.raises(OperatingError, match="was deleted and made anew since"):
            resync(app, "model")
    resync(app, "model")
    assert read() == OLD


@pytest.mark.guarantee("W64")
@pytest.mark.parametrize(
    ("key_type", "column", "keys"),
    [
        (UUID, "uuid", [str(UUID(int=n)) for n in range(3)]),
        # The column writes the keys otherwise than their records have them.
        (str, "int", ["007", "008", "9"]),
    ],
    ids=["UUIDs", "texts of numbers"],
)
def test_rows_stay_whatever_form_their_keys_have(
    make, admin, topic, bootstrap_servers, versions, key_type, column, keys, wait_for
):
    name = topic(1, config={"cleanup.policy": "compact"})
    send(bootstrap_servers, name, [(key, {}, 1) for key in keys])
    admin.execute(
        f"create table model (id {column} primary key, version bigint, n int)"
    )
    app = make(heartbeat_interval=0.5, stale_after=5.0)

    @app.read_model(
        name,
        table="model",
        key="id",
        group=name,
        key_type=key_type,
        versions=versions,
    )
    def row(record):
        return {"n": 1}

    def count() -> int:
        return admin.execute("select count(*) from model").fetchone()[0]

    with running(app, "consumers"):
        wait_for(lambda: count() == len(keys), timeout=60, what="the model is filled")
        assert resync(app, "model") == (0, True)
    assert count() == len(keys)
    assert left_behind(admin) == []


def test_a_row_with_a_uuid_goes_if_its_key_is_not_shown(
    make, admin, topic, bootstrap_servers
):
    name = topic(1, config={"cleanup.policy": "compact"})
    known, orphan = (str(UUID(int=n)) for n in range(2))
    send(bootstrap_servers, name, [(known, {}, 1)])
    admin.execute("create table model (id uuid primary key, version bigint, n int)")
    for key in (known, orphan):
        admin.execute("insert into model values (%s, 1, 1)", (key,))
    app = make(heartbeat_interval=0.5, stale_after=5.0)

    @app.read_model(name, table="model", key="id", group=name, key_type=UUID)
    def row(record):
        return {"n": 1}

    assert resync(app, "model") == (1, True)
    assert admin.execute("select id::text from model").fetchall() == [(known,)]


def test_a_row_without_version_stays_if_its_record_came_meanwhile(
    make, admin, topic, bootstrap_servers, database
):
    name = topic(1, config={"cleanup.policy": "compact"})
    key = UUID(int=7)
    admin.execute("create table model (id uuid primary key, version bigint, n int)")
    admin.execute("insert into model values (%s, null, 1)", (key,))
    # As the consumer notes the place of its record.
    note = (
        "insert into jobs_lib.model_keys as k"
        " (model, key, is_gone, topic_id, partition, record_offset)"
        " values ('model', %s, false, gen_random_uuid(), 0, %s)"
        " on conflict (model, key) do update set record_offset = excluded.record_offset"
    )
    admin.execute(note, (key.hex, 3))
    app = make(heartbeat_interval=0.5, stale_after=5.0)

    @app.read_model(name, table="model", key="id", group=name, key_type=UUID)
    def row(record):
        return {"n": 1}

    work = Resync(app.settings, database, find_model_of(app, "model"))
    assert work.begin()
    admin.execute(note, (key.hex, 4))
    assert work.end() == (0, True)
    assert admin.execute("select count(*) from model").fetchone() == (1,)
