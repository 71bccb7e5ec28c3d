"""A group that is set back reads everything from there again, in order."""

from __future__ import annotations

import threading
from uuid import UUID

import pytest
from confluent_kafka import TopicPartition

from jobs_lib.errors import OperatingError
from jobs_lib.operating.rewinds import replay, rewind
from tests.support.apps import running
from tests.support.records import produce

HEARTBEAT = 0.5
# What the owner had begun is refused, and the owner says so.
pytestmark = pytest.mark.expects("origins.lost", "fenced")


@pytest.fixture
def name(topic, bootstrap_servers):
    """A topic of one partition, with the values 0 to 14 of one key."""
    name = topic(1)
    produce(bootstrap_servers, name, [("k", n) for n in range(15)])
    return name


@pytest.fixture
def app(make):
    """An app whose processes notice soon what they have lost."""
    return make(
        heartbeat_interval=HEARTBEAT,
        stale_after=5.0,
        # However busy the machine is, no block ends before it is full.
        consumer_block_seconds=60.0,
    )


def test_a_partition_taken_again_before_anything_was_stored_loses_nothing(
    app, name, database, admin, gate, read_offsets, wait_for
):
    seen, begun = [], threading.Event()

    @app.consumer(name, group=name)
    def handle(record, conn) -> None:
        begun.set()
        gate.wait()
        seen.append(record.value)

    with running(app, "consumers"):
        assert begun.wait(30)
        # All are in memory, and none is stored.
        rewind_all(admin, name)
        wait_for(lambda: owner_of(admin, name), timeout=30, what="it is taken again")
        gate.set()
        wait_for(lambda: read_offsets(name) == {0: 15}, timeout=30, what="all are in")
    # The first try of 0 was not committed.
    assert seen[-15:] == [*range(15)]


def rewind_all(admin, topic: str) -> None:
    admin.execute(
        "update jobs_lib.origins set owner = null, epoch = epoch + 1 where origin = %s",
        (f"{topic}/0",),
    )


def owner_of(admin, topic: str):
    row = admin.execute(
        "select owner from jobs_lib.origins where origin = %s", (f"{topic}/0",)
    ).fetchone()
    return row and row[0]


@pytest.mark.parametrize("place", [0, 7])
def test_a_running_service_reads_again_from_where_its_group_was_set_back(
    app, name, database, read_offsets, wait_for, place
):
    seen = []

    @app.consumer(name, group=name)
    def handle(record, conn) -> None:
        seen.append((record.value, record.repeated))

    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 15}, timeout=30, what="all are in")
        (rewound,) = rewind(database, name, name, {0: place})
        assert (rewound.before, rewound.after) == (15, place)
        wait_for(lambda: len(seen) == 30 - place, timeout=30, what="all come again")
        wait_for(lambda: read_offsets(name) == {0: 15}, timeout=30, what="all are in")
    assert seen[:15] == [(n, False) for n in range(15)]
    assert seen[15:] == [(n, True) for n in range(place, 15)]


def test_a_block_that_was_begun_before_the_group_was_set_back_does_not_count(
    app, name, database, gate, admin, read_offsets, wait_for
):
    admin.execute("create table seen (n int)")
    begun = threading.Event()

    @app.consumer(name, group=name, block=5)
    def handle(record, conn) -> None:
        conn.execute("insert into seen values (%s)", (record.value,))
        if record.value == 7 and not record.repeated and not begun.is_set():
            begun.set()
            gate.wait()

    with running(app, "consumers"):
        assert begun.wait(30)
        assert read_offsets(name) == {0: 5}
        rewind(database, name, name, {0: 2})
        gate.set()
        wait_for(lambda: read_offsets(name) == {0: 15}, timeout=30, what="all are in")
    rows = admin.execute("select n, count(*) from seen group by n").fetchall()
    assert dict(rows) == {n: 2 if n in (2, 3, 4) else 1 for n in range(15)}


@pytest.mark.guarantee("W71")
def test_a_replay_leaves_the_result_as_if_nothing_had_been_skipped(
    app, name, database, admin, read_offsets, read_failure_count, wait_for
):
    admin.execute(
        "create table kept (n int primary key, repeated boolean, at bigserial)"
    )
    broken = {3, 9}

    @app.consumer(name, group=name, on_error="skip", repeatable=True)
    def handle(record, conn) -> None:
        if record.value in broken:
            raise ValueError("it cannot be handled yet")
        conn.execute("delete from kept where n = %s", (record.value,))
        values = record.value, record.repeated
        conn.execute("insert into kept values (%s, %s)", values)

    def read():
        return [n for (n,) in admin.execute("select n from kept order by at")]

    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 15}, timeout=30, what="all are in")
        assert read() == [n for n in range(15) if n not in broken]
        assert read_failure_count(name) == 2
        broken.clear()
        (rewound,) = replay(app.settings, database, name, name)
        assert (rewound.after, rewound.skipped) == (3, 2)
        wait_for(lambda: read() == [*range(15)], timeout=30, what="all are in order")
        wait_for(lambda: read_offsets(name) == {0: 15}, timeout=30, what="all are in")
    assert read_failure_count(name) == 0
    # Effects elsewhere that a handler leaves out at a repeat were never had.
    rows = admin.execute("select n from kept where repeated order by at").fetchall()
    assert [n for (n,) in rows] == [n for n in range(3, 15) if n not in (3, 9)]


@pytest.fixture
def read_failure_count(admin):
    """A function that counts what was skipped of a topic."""

    def read(topic: str) -> int:
        (count,) = admin.execute(
            "select count(*) from jobs_lib.skipped where topic = %s", (topic,)
        ).fetchone()
        return count

    return read


def test_a_replay_begins_with_the_first_skipped_record(
    app, name, database, read_offsets, read_failure_count, wait_for
):
    seen, broken = [], {3, 9}

    @app.consumer(name, group=name, on_error="skip", repeatable=True)
    def handle(record, conn) -> None:
        if record.value in broken:
            raise ValueError("it cannot be handled yet")
        seen.append(record.value)

    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 15}, timeout=30, what="all are in")
        assert replay(app.settings, database, name, name, 1) == []
        broken.discard(3)
        seen.clear()
        (rewound,) = replay(app.settings, database, name, name)
        assert (rewound.after, rewound.skipped) == (3, 2)
        wait_for(lambda: seen[-1:] == [14], timeout=30, what="all come again")
        wait_for(lambda: read_offsets(name) == {0: 15}, timeout=30, what="all are in")
    # What fails again is skipped again.
    assert [*dict.fromkeys(seen)] == [n for n in range(3, 15) if n != 9]
    assert read_failure_count(name) == 1


@pytest.mark.parametrize("start", [6, 15])
def test_a_replay_says_which_skipped_records_are_gone_and_keeps_their_rows(
    app, name, database, admin, kafka_admin, read_offsets, wait_for, start
):
    seen, broken = [], {3, 9}

    @app.consumer(name, group=name, on_error="skip", repeatable=True)
    def handle(record, conn) -> None:
        seen.append(record.value)
        if record.value in broken:
            raise ValueError("it cannot be handled yet")

    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 15}, timeout=30, what="all are in")
        at = [TopicPartition(name, 0, start)]
        for deleted in kafka_admin.delete_records(at).values():
            deleted.result()
        seen.clear()
        broken.clear()
        (rewound,) = replay(app.settings, database, name, name)
        wait_for(lambda: read_offsets(name) == {0: 15}, timeout=30, what="all are in")
    left = admin.execute("select record_offset from jobs_lib.skipped order by 1")
    kept, counts = ([3], (6, 1, 1)) if start == 6 else ([3, 9], (15, 0, 2))
    assert (rewound.after, rewound.skipped, rewound.gone) == counts
    assert [offset for (offset,) in left] == kept
    assert seen == [*range(start, 15)]


def test_a_place_that_the_group_has_not_reached_is_refused(
    app, name, database, read_offsets, wait_for
):
    @app.consumer(name, group=name)
    def handle(record, conn) -> None: ...

    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 15}, timeout=30, what="all are in")
    for group, places, told in [
        (name, {0: 16}, "from 0 to that, not 16"),
        (name, {0: -1}, "from 0 to that, not -1"),
        (name, {0: 3, 1: 0}, "it has read the partitions 0"),
        ("nobody", {0: 0}, "see `jobs-lib owners`"),
    ]:
        with pytest.raises(OperatingError, match=told):
            rewind(database, group, name, places)
        assert read_offsets(name) == {0: 15}


@pytest.mark.guarantee("W71")
def test_what_was_skipped_of_an_earlier_topic_stays(database, admin):
    admin.execute(
        "insert into jobs_lib.offsets"
        " (consumer_group, topic, partition, next_offset, topic_id)"
        " values ('g', 't', 0, 9, %s)",
        (UUID(int=2),),
    )
    admin.execute(
        "insert into jobs_lib.skipped"
        " (consumer_group, topic, partition, record_offset, topic_id, error)"
        " select 'g', 't', 0, place, id, 'it failed'"
        " from unnest('{1,2,3}'::int[], %s::uuid[]) as of(place, id)",
        ([UUID(int=1), UUID(int=2), None],),
    )
    (rewound,) = rewind(database, "g", "t", {0: 0})
    assert (rewound.after, rewound.skipped) == (0, 2)
    # They go with their records, as these are applied.
    with database.connect("test") as connection:
        place = {"group": "g", "topic": "t", "partition": 0}
        read = place | {"first": 0, "following": 9}
        rows = connection.execute(database.queries["read_skipped"], read).fetchall()
        assert sorted(rows) == [(2,), (3,)]
        connection.execute(database.queries["forget_skipped"], read)
    left = admin.execute("select record_offset from jobs_lib.skipped").fetchall()
    assert left == [(1,)]
