"""How often it is written and told that a record has failed or was skipped."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest

from jobs_lib import backoff
from jobs_lib.consuming.failures import Alarms, Failures
from jobs_lib.consuming.progress import Progress
from tests.support.apps import heard
from tests.support.fake_records import fake_record


@pytest.fixture
def clock(monkeypatch):
    """The time: `clock.now += 1` is a second later."""
    clock = Mock(now=1_000.0)
    monkeypatch.setattr(f"{Failures.__module__}.time.monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def offsets() -> Any:
    """The offsets of a group, which note how they are called."""
    return Mock()


@pytest.fixture
def noting(offsets) -> Failures:
    return Failures("g", {}, offsets, Mock())


@pytest.fixture
def progress() -> Progress:
    return Progress(("orders", 0), epoch=1, stored=10)


def read_notes(offsets) -> list[tuple[int, str]]:
    return [call.args[2:] for call in offsets.note_failure.call_args_list]


def test_what_is_written_already_is_not_written_at_each_attempt(
    clock, offsets, noting, progress
):
    connection = Mock()
    for _ in range(10):
        noting.note_stop(connection, progress, 10, "no price")
        clock.now += 2.5
    assert read_notes(offsets) == [(10, "no price")]
    # A failover may have lost it.
    clock.now += 10
    noting.note_stop(connection, progress, 10, "no price")
    assert read_notes(offsets) == [(10, "no price")] * 2


def test_notes_of_a_partition_are_a_second_apart(clock, offsets, noting, progress):
    connection = Mock()
    for attempt in range(30):
        noting.note_stop(connection, progress, 10, f"attempt {attempt}")
        noting.note_stop(
            connection, Progress(("orders", 1), 1, 10), 10, f"attempt {attempt}"
        )
        clock.now += 0.125
    noted = [f"attempt {n}" for n in (0, 8, 16, 24)]
    assert read_notes(offsets) == [(10, note) for note in noted for _ in range(2)]


def test_a_new_owner_of_the_partition_writes_it_again(clock, offsets, noting, progress):
    noting.note_stop(Mock(), progress, 10, "no price")
    clock.now += 2
    noting.note_stop(Mock(), Progress(("orders", 0), 2, 10), 10, "no price")
    assert len(read_notes(offsets)) == 2


def test_a_note_without_a_connection_is_written_with_the_next_one(
    clock, offsets, noting, progress
):
    noting.note_stop(None, progress, 10, "the connection is lost")
    assert read_notes(offsets) == []
    noting.write_late(Mock(), progress)
    noting.write_late(Mock(), progress)
    assert read_notes(offsets) == [(10, "the connection is lost")]


def test_a_late_note_is_dropped_once_the_partition_has_gone_on(
    clock, offsets, noting, progress
):
    noting.note_stop(None, progress, 10, "the connection is lost")
    progress.stored = 11
    noting.write_late(Mock(), progress)
    assert read_notes(offsets) == []


def test_a_note_that_the_database_refuses_stops_nothing(
    clock, offsets, noting, progress
):
    offsets.note_failure.side_effect = psycopg.errors.InsufficientPrivilege("no right")
    connection = Mock(closed=False)
    with heard("loop.failed") as failed:
        noting.note_stop(connection, progress, 10, "no price")
    assert connection.rollback.called
    assert failed[0][1]["sqlstate"] == "42501"
    with pytest.raises(psycopg.Error):
        noting.note_stop(Mock(closed=True), progress, 10, "no price")


@pytest.mark.guarantee("W68")
def test_a_record_that_fails_is_tried_and_told_less_and_less_often(
    clock, offsets, progress, monkeypatch
):
    monkeypatch.setattr(f"{backoff.__name__}.random.random", lambda: 1.0)
    failures = Failures("g", {"orders": Mock(on_error="stop")}, offsets, Mock())
    message = fake_record(10, topic="orders")
    progress.push([message])
    waits = []
    with heard("record.failed") as failed:
        for _ in range(9):
            failures.note(None, progress, [message], 0, ValueError("no JSON"))
            assert not progress.is_ready(clock.now)
            waits.append(progress.retry_at - clock.now)
            clock.now = progress.retry_at
            assert progress.is_ready(clock.now)
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5])
    # It is told once for each attempt, and nothing else is.
    assert [fields["offset"] for _, fields in failed] == [10] * len(waits)


def test_the_first_skipped_record_of_a_partition_is_told_at_once_then_a_count(
    clock, caplog
):
    alarms = Alarms("g")
    with heard("record.skipped") as told, caplog.at_level(logging.ERROR, "jobs_lib"):
        for offset in range(100):
            alarms.add("orders/0", offset, f"error {offset}")
            clock.now += 0.25
        alarms.add("orders/1", 7, "another")
        clock.now += 10
        alarms.tell()
        alarms.tell()
    seen = [(f["origin"], f["offset"], f["count"]) for _, f in told]
    assert seen == [
        ("orders/0", 0, 1),
        ("orders/0", 40, 40),
        ("orders/0", 80, 40),
        ("orders/1", 7, 1),
        ("orders/0", 99, 19),
    ]
    assert [f["error"] for _, f in told][1] == "error 40"
    lines = [one.getMessage() for one in caplog.records]
    assert lines[0] == (
        "record.skipped group=g origin=orders/0 offset=0 error=error 0 count=1"
    )
    assert len(lines) == 5


def test_what_was_skipped_is_told_before_its_partition_leaves(clock):
    alarms = Alarms("g")
    with heard("record.skipped") as told:
        for offset in range(3):
            alarms.add("orders/0", offset, "no price")
            alarms.add("orders/1", offset, "no price")
        alarms.tell({"orders/0"})
    counts = [(f["origin"], f["count"]) for _, f in told]
    assert counts == [("orders/0", 1), ("orders/1", 1), ("orders/0", 2)]
