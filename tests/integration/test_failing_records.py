"""What the tables say of records that fail, and who may say it."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from jobs_lib import FencedError
from jobs_lib.consuming.offsets import MOVED, Offsets
from jobs_lib.consuming.progress import Progress
from tests.operating.helpers import add_owner


@pytest.fixture
def owner(admin):
    """The process that owns the partition orders/0 of the group g, at epoch 7."""
    admin.execute(
        "insert into jobs_lib.offsets"
        " (consumer_group, topic, partition, next_offset, topic_id)"
        " values ('g', 'orders', 0, 10, gen_random_uuid())"
    )
    return add_owner(admin, origin="orders/0", role="consume:g")


@pytest.fixture
def connection(database):
    """The connection of a thread that applies records."""
    with database.connect("test") as connection:
        connection.autocommit = False
        yield connection


@pytest.fixture
def offsets(database, owner) -> Offsets:
    return Offsets(database.queries, "g", owner)


def at(epoch: int = 7, stored: int = 10) -> Progress:
    return Progress(("orders", 0), epoch=epoch, stored=stored)


def read_failure(admin) -> tuple[Any, ...]:
    row: tuple[Any, ...] = admin.execute(
        "select failed_offset, failure, failing_since from jobs_lib.offsets"
    ).fetchone()
    return row


def test_the_same_record_fails_since_its_first_note(admin, offsets, connection):
    offsets.note_failure(connection, at(), 12, "first")
    failed, error, since = read_failure(admin)
    assert (failed, error) == (12, "first")
    offsets.note_failure(connection, at(), 12, "second")
    assert read_failure(admin) == (12, "second", since)
    offsets.note_failure(connection, at(), 14, "third")
    assert read_failure(admin)[:2] == (14, "third")
    assert read_failure(admin)[2] > since
    offsets.clear_failure(connection, at())
    assert read_failure(admin) == (None, None, None)


@pytest.mark.parametrize(
    "stale", [at(epoch=6), at(stored=9)], ids=["another epoch", "another offset"]
)
@pytest.mark.guarantee("FP16")
def test_an_owner_of_before_changes_no_note(admin, offsets, connection, stale):
    offsets.note_failure(connection, stale, 12, "of before")
    assert read_failure(admin) == (None, None, None)
    offsets.note_failure(connection, at(), 12, "of now")
    noted = read_failure(admin)
    offsets.note_failure(connection, stale, 11, "of before")
    offsets.clear_failure(connection, stale)
    assert read_failure(admin) == noted


@pytest.mark.guarantee("FP16")
def test_a_note_that_waits_for_a_take_over_changes_nothing(
    admin, connect, offsets, connection, wait_for
):
    taking = connect()
    taking.execute("update jobs_lib.origins set epoch = 8 where role = 'consume:g'")
    noting = threading.Thread(
        target=offsets.note_failure, args=(connection, at(), 12, "of before")
    )
    noting.start()
    waits = (
        "select true from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
    )
    pid = connection.info.backend_pid
    try:
        wait_for(
            lambda: admin.execute(waits, (pid,)).fetchone() or not noting.is_alive(),
            what="it waits for the take-over",
        )
    finally:
        taking.commit()
        noting.join()
    assert read_failure(admin) == (None, None, None)


def test_a_moved_offset_takes_the_note_away(admin, offsets, connection):
    offsets.note_failure(connection, at(), 12, "no price")
    mark = offsets.begin(connection)
    offsets.advance(connection, at(), 13, None, mark)
    assert read_failure(admin) == (None, None, None)


@pytest.mark.guarantee("W70")
def test_a_skipped_record_and_the_offset_behind_it_are_one_transaction(
    admin, offsets, connection
):
    rows = (
        "select s.record_offset, s.error, s.topic_id = o.topic_id, o.next_offset"
        " from jobs_lib.offsets o left join jobs_lib.skipped s"
        " using (consumer_group, topic, partition)"
    )
    with pytest.raises(FencedError):
        offsets.skip(connection, at(epoch=6), 10, "no price", None)
    connection.rollback()
    with pytest.raises(psycopg.Error) as moved:
        offsets.skip(connection, at(stored=9), 9, "no price", None)
    connection.rollback()
    assert moved.value.sqlstate == MOVED
    assert admin.execute(rows).fetchall() == [(None, None, None, 10)]
    offsets.skip(connection, at(), 10, "no price", None)
    assert admin.execute(rows).fetchall() == [(10, "no price", True, 11)]


def test_a_record_that_is_skipped_again_says_why_it_was_the_last_time(
    admin, offsets, connection
):
    offsets.skip(connection, at(), 10, "first", None)
    admin.execute(
        "update jobs_lib.offsets set next_offset = 10, topic_id = gen_random_uuid()"
    )
    offsets.skip(connection, at(), 10, "second", None)
    rows = admin.execute(
        "select s.error, s.topic_id = o.topic_id from jobs_lib.skipped s"
        " join jobs_lib.offsets o using (consumer_group, topic, partition)"
    )
    assert rows.fetchall() == [("second", True)]
