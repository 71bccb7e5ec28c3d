"""The measured rate of a re-export, and the end that follows from it."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime, timedelta

import pytest

from jobs_lib import reexport
from jobs_lib.app import App
from jobs_lib.cli.reexport import reexport as commands
from jobs_lib.settings import Settings
from tests.reexport.helpers import make_entity, make_table, query
from tests.support.commands import make_runner

TOTAL = 10_000


@pytest.fixture
def note(database):
    """A function that notes sent records, as a relay does, some seconds after."""
    make_table(database, range(TOTAL))
    reexport.start(database, make_entity(), rate=6_000)

    def note(sent: int, after: float = 0.0) -> reexport.Progress:
        query(
            database,
            # All that was noted before is so much older now.
            "update jobs_lib.reexports r set marks = (select coalesce(array_agg("
            " m - case when n %% 2 = 1 then %s else 0 end order by n), '{}')"
            " from unnest(r.marks) with ordinality as a(m, n)) returning 1",
            after,
        )
        query(
            database,
            "update jobs_lib.reexports set sent = sent + %s,"
            " marks = jobs_lib.note_sent(marks, sent) returning 1",
            sent,
        )
        return reexport.status(database, "aircraft")

    return note


def lasts(progress: reexport.Progress) -> float:
    """Minutes from now to the end, roughly."""
    assert progress.eta is not None
    return (progress.eta - datetime.now(UTC)) / timedelta(minutes=1)


@pytest.mark.guarantee("X8")
def test_the_rate_is_that_of_the_last_minute(database, note):
    first = reexport.status(database, "aircraft")
    assert first.measured is None
    # What is planned, without a measure.
    assert lasts(first) == pytest.approx(TOTAL / (6_000 * 0.975), abs=0.3)
    assert note(100).measured is None
    for _ in range(5):
        progress = note(100, after=20)
    # A hundred every twenty seconds, and the seconds that the test itself takes.
    assert 150 <= progress.measured <= 400
    left = TOTAL - 600
    assert lasts(progress) == pytest.approx(left / progress.measured, rel=0.05)
    (marks,) = query(database, "select marks from jobs_lib.reexports")[0]
    assert len(marks) <= 2 * 9


def test_blocks_within_ten_seconds_share_a_mark(database, note):
    began = time.monotonic()
    for _ in range(30):
        note(10, after=0.5)
    took = 30 * 0.5 + time.monotonic() - began
    (marks,) = query(database, "select marks from jobs_lib.reexports")[0]
    assert 4 <= len(marks) <= 2 * (1 + took / 10)


def test_a_measure_above_the_rate_brings_the_end_no_nearer(database, note):
    note(3_000)
    progress = note(3_000, after=20)
    assert progress.measured > 5_850
    assert lasts(progress) == pytest.approx(4_000 / (6_000 * 0.975), abs=0.3)


def test_nobody_knows_the_end_where_nothing_is_sent(database, note):
    note(100)
    note(100, after=20)
    # Nothing is sent for two minutes: the marks stay as they are.
    query(
        database,
        "update jobs_lib.reexports set marks = array[marks[1] - 120, marks[2],"
        " marks[3] - 120, marks[4]] returning 1",
    )
    progress = reexport.status(database, "aircraft")
    assert (progress.measured, progress.eta) == (0, None)
    # It begins anew.
    assert note(100).measured is None


def test_a_clock_that_was_set_back_spoils_no_measure(database, note):
    note(100)
    note(100, after=-3_600)
    assert 300 <= note(100, after=20).measured <= 600
    # What was noted ahead of the clock is gone: it would stay for ever.
    (marks,) = query(database, "select marks from jobs_lib.reexports")[0]
    assert len(marks) == 4


def test_one_that_has_ended_has_no_measure(database, note):
    note(100)
    note(100, after=20)
    assert reexport.cancel(database, "aircraft").measured is None


def test_the_commands_tell_the_measure(database, note, monkeypatch):
    app = App("test", settings=Settings(database_url=database.url))
    app.entities["aircraft"] = make_entity()
    run = make_runner(commands, app, monkeypatch)
    assert "measured" not in run("status", "aircraft")
    note(100)
    note(100, after=30)
    found = re.search(r"measured: (\d+) records a minute\n", run("status", "aircraft"))
    assert found
    assert 200 <= int(found[1]) <= 400
    (listed,) = json.loads(run("list", "--json"))
    assert 200 <= listed["measured"] <= 400
