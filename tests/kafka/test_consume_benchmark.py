"""The judge of the benchmark of consumers, and the programs that it measures."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.consume import peers
from benchmarks.consume.stage import Stage
from benchmarks.consume.tables import (
    HANDLED,
    READ_MODEL,
    find_difference,
    judge_writes,
    log_writes,
    tell_writes,
)
from benchmarks.consume.topics import Topic

WRITE = """
insert into aircraft_rm values (%s, 'VIE', 61, 1, %s)
on conflict (tail) do update set version = excluded.version
"""
DRAINS = [
    *((peers.PEERS[name], READ_MODEL) for name in peers.PEERS),
    (peers.READ_MODEL, READ_MODEL),
    (peers.HANDLER, HANDLED),
    (peers.INSERT_LOOP, HANDLED),
]


def write(connection, *versions, key="N1"):
    for version in versions:
        connection.execute(WRITE, (key, version))


def make_topic(**versions):
    """A topic that these keys have these versions in; a gone key has none."""
    topic = Topic("states", records=len(versions))
    for key, version in versions.items():
        if version is None:
            topic.gone.add(key)
        else:
            topic.rows[key] = ("VIE", 61, 1, version)
        topic.sums[key] = (1, version or 0)
    return topic


def test_a_row_that_goes_back_in_time_is_counted_and_one_that_goes_on_is_not(admin):
    READ_MODEL.make(admin)
    log_writes(admin)
    write(admin, 1, 2, 3)
    write(admin, 1, 3, key="N2")
    assert judge_writes(admin) == {
        "writes": 5,
        "written_again": 0,
        "gone_back_in_time": 0,
        "keys_gone_back": 0,
    }
    write(admin, 2, 3, 1)
    assert judge_writes(admin) == {
        "writes": 8,
        "written_again": 3,
        "gone_back_in_time": 2,
        "keys_gone_back": 1,
    }


def test_a_table_that_differs_from_its_topic_is_told_in_one_line(admin):
    READ_MODEL.make(admin)
    write(admin, 1)
    write(admin, 4, key="N2")
    assert find_difference(admin, READ_MODEL, make_topic(N1=1, N2=4)) is None
    topic = make_topic(N1=2, N2=None, N3=1)
    assert (
        find_difference(admin, READ_MODEL, topic)
        == "1 rows are missing, 1 are too many, 1 differ"
    )
    # A consumer that removes nothing may keep what is gone.
    assert (
        find_difference(admin, READ_MODEL, topic, deletes=False)
        == "1 rows are missing, 0 are too many, 1 differ"
    )


def test_a_record_that_was_handled_twice_or_not_at_all_is_told(admin):
    HANDLED.make(admin)
    topic = make_topic(N1=1, N2=4, N3=None, N4=None)
    insert = "insert into handled (tail, version) values (%s, %s)"
    for key, version in (("N1", 1), ("N2", 4), ("N3", None), ("N4", None)):
        admin.execute(insert, (key, version))
    assert find_difference(admin, HANDLED, topic) is None
    admin.execute("update handled set tail = 'N4' where tail = 'N3'")
    assert find_difference(admin, HANDLED, topic) == "the rows of 2 keys differ"


def test_a_write_is_told_with_its_key(admin, connect):
    READ_MODEL.make(admin)
    tell_writes(admin)
    hears = connect(autocommit=True)
    hears.execute("listen rm")
    write(admin, 7, key="N5")
    notes = [note.payload for note in hears.notifies(timeout=10, stop_after=1)]
    assert notes == ["N5"]


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "table"), DRAINS, ids=lambda one: one.name)
def test_a_consumer_of_the_benchmark_makes_a_table_that_is_equal_to_its_topic(
    peer, table, jobs_database_url, admin, kafka_broker, wait_for
):
    if not peer.installed:
        pytest.skip(f"{peer.name} is not installed: make bench-peers installs it")
    stage = Stage(cast("Any", None), kafka_broker, {})
    topic = stage.topics.fill(2_000, 300)
    table.make(admin)
    with stage.consuming(peer, topic, database=jobs_database_url) as running:
        stage.await_progress(running, admin, table, topic, seconds=120, pause=0.02)
        wait_for(
            lambda: find_difference(admin, table, topic, deletes=peer.deletes) is None,
            what=f"{peer.name} is equal to the topic",
        )
