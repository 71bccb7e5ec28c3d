"""The start of a group: no job below it is left, and when this is certain."""

from __future__ import annotations

import pytest

from jobs_lib.executor.claiming import group_starts as module
from jobs_lib.executor.claiming.cursor import Cursor
from jobs_lib.executor.claiming.group_starts import GroupStarts
from jobs_lib.executor.claiming.in_flight import InFlight
from jobs_lib.executor.claiming.late_commits import LateCommits

GROUP = ("local/1", "g")


@pytest.fixture
def floors():
    """The starts after a group had the head 100; no row up to 80 could still appear."""
    floors = GroupStarts()
    floors.note(GROUP, 100, 20, 80)
    return floors


def test_a_floor_is_below_the_head_and_where_nothing_can_appear(floors):
    assert floors.find(GROUP) == 80
    floors.note(GROUP, 100, 1, 200)
    assert floors.find(GROUP) == 99
    floors.note(GROUP, 150, 1, 0)
    assert floors.find(GROUP) == 99


def test_a_job_found_behind_the_cursor_lowers_the_floor(floors):
    floors.lower(GROUP, 90)
    assert floors.find(GROUP) == 80
    floors.lower(GROUP, 50)
    assert floors.find(GROUP) == 49
    floors.note(GROUP, 30, 1, 80)
    assert floors.find(GROUP) == 29


def test_a_claim_gets_the_floors_of_large_groups_of_its_origins_only(floors):
    floors.note(("local/1", "few"), 100, 1, 80)
    floors.note(("local/2", "g"), 100, 20, 80)
    assert floors.choose(["local/1"], ()) == [(*GROUP, 80)]
    assert floors.choose(["local/1"], [GROUP]) == []
    floors.release(["local/1"])
    assert floors.find(GROUP) == 0


def test_the_groups_that_were_met_last_are_known(floors, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 2)
    floors.note(("local/1", "h"), 100, 20, 80)
    floors.note(GROUP, 101, 20, 80)
    floors.note(("local/1", "i"), 100, 20, 80)
    assert floors.find(("local/1", "h")) == 0
    assert floors.find(GROUP) == 80


def test_no_mark_is_above_the_cursor_of_the_horizons_moment(monkeypatch):
    # The claim of the same round trip comes after the horizon. A row that it found may
    # lie above a row that was drawn since and is not committed yet.
    late_commits, position = LateCommits(), Cursor(1, at=5)
    positions = {"local/1": position}
    monkeypatch.setattr("jobs_lib.executor.claiming.late_commits._MARK_PAUSE", 0.0)
    late_commits.prepare(positions, [], InFlight())
    position.at = 9
    late_commits.note_horizon(10, 10, [], positions)
    late_commits.prepare(positions, [], InFlight())
    late_commits.note_horizon(10, 10, [], positions)
    assert position.no_commits_below == 5
