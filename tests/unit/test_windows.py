"""A claim chooses the origins of its next windows and jump."""

from __future__ import annotations

from uuid import UUID

import pytest

from jobs_lib.executor.claiming.group_starts import GroupStarts
from jobs_lib.executor.claiming.in_flight import InFlight
from jobs_lib.executor.claiming.rows import JumpRow
from jobs_lib.executor.claiming.windows import Windows
from jobs_lib.executor.lane import Finished, Lane

ORIGINS = ["local/0", "local/1"]


@pytest.fixture
def windows():
    """Windows of two origins that may hold jobs."""
    windows = Windows()
    windows.take(dict.fromkeys(ORIGINS, 1))
    for position in windows.cursors.values():
        position.seen = position.may_have_more = True
    return windows


def fill_in_vain(windows, origin: str) -> None:
    """Fill a window of the origin with jobs that cannot run."""
    windows.prepare([origin], 10)
    windows.note(origin, 0, 10, 10, plain=False, barren=True)


def jump(windows, found: list[int], furthest: int | None, count: int | None = None):
    """Let a jump find jobs; return how far it might have gone, and its result."""
    asked = windows.prepare_jump(windows.cursors, 10, [], GroupStarts())
    limit = asked["limit"]
    seen = limit if count is None else count
    row = JumpRow(found, furthest, seen, [], [], [], [])
    return limit, windows.read_jump(asked, row, InFlight())


def test_a_stuck_origin_gets_a_jump_and_the_others_get_windows(windows):
    fill_in_vain(windows, ORIGINS[0])
    assert windows.choose(windows.cursors, 10) == ORIGINS[1:]
    asked = windows.prepare_jump(windows.cursors, 10, [], GroupStarts())
    assert (asked["origin"], asked["cursor"], asked["limit"]) == (ORIGINS[0], 10, 640)


def test_windows_go_on_behind_a_jump_that_finds_many_jobs(windows):
    fill_in_vain(windows, ORIGINS[0])
    found = list(range(500, 510))
    assert jump(windows, found, 600) == (640, dict.fromkeys(found, ORIGINS[0]))
    assert windows.cursors[ORIGINS[0]].at == 509
    assert sorted(windows.choose(windows.cursors, 10)) == ORIGINS


def test_jumps_that_find_few_jobs_reach_further_each_time_until_the_end(windows):
    fill_in_vain(windows, ORIGINS[0])
    assert jump(windows, [500], 10_000) == (640, {500: ORIGINS[0]})
    assert windows.cursors[ORIGINS[0]].at == 10_000
    assert jump(windows, [], 20_000) == (40_960, {})
    assert jump(windows, [30_001], 30_001, count=7) == (100_000, {30_001: ORIGINS[0]})
    assert windows.cursors[ORIGINS[0]].at == 30_001
    assert windows.choose(windows.cursors, 10) == ORIGINS[1:]
    assert windows.prepare_jump(windows.cursors, 10, [], GroupStarts()) is None


def test_other_priorities_do_not_wait_for_a_jump(windows):
    windows.prioritized = True
    fill_in_vain(windows, ORIGINS[0])
    deep = windows.choose(windows.cursors, 10)
    assert sorted(deep) == ORIGINS
    asked = windows.prepare(deep, 10)
    assert ORIGINS[0] not in asked["window_origins"]
    assert ORIGINS[0] in asked["level_origins"]
    jump(windows, [], None, 0)
    assert windows.cursors[ORIGINS[0]].may_have_more


def test_a_busy_lane_may_have_more_jobs_after_a_jump(windows):
    windows.prioritized = True
    flight = InFlight()
    busy = ("local/0", "g")
    flight.lanes[busy] = lane = Lane("local/0", 1, "g", 1, UUID(int=1), Finished())
    fill_in_vain(windows, ORIGINS[0])
    asked = windows.prepare_jump(windows.cursors, 10, [busy], GroupStarts())
    windows.read_jump(asked, JumpRow([500], 600, 640, [], [], [], []), flight)
    assert windows.cursors[ORIGINS[0]].at == 499
    assert lane.more
