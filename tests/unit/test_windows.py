"""Where a claim looks next."""

from __future__ import annotations

import pytest

from jobs_lib.jobs.flight import Flight
from jobs_lib.jobs.floors import Floors
from jobs_lib.jobs.windows import Windows

ORIGINS = ["local/0", "local/1"]


@pytest.fixture
def windows():
    """Windows of two origins, in which there may be something."""
    windows = Windows()
    windows.add(dict.fromkeys(ORIGINS, 1))
    for position in windows.positions.values():
        position.seen = position.deep = True
    return windows


def fill_in_vain(windows, origin: str) -> None:
    """A window of the origin is full, and nothing in it can run."""
    windows.prepare([origin], 10)
    windows.note(origin, 0, 10, 10, plain=False, barren=True)


def test_a_stuck_origin_is_jumped_in_and_the_others_are_looked_at(windows):
    fill_in_vain(windows, ORIGINS[0])
    assert windows.choose(windows.positions, 10) == ORIGINS[1:]
    asked = windows.prepare_jump(windows.positions, 10, [], Floors())
    assert (asked["origin"], asked["cursor"], asked["limit"]) == (ORIGINS[0], 10, 160)
    windows.read_jump(160, (500, 600, 160), Flight())
    assert windows.positions[ORIGINS[0]].cursor == 499
    assert sorted(windows.choose(windows.positions, 10)) == ORIGINS


def test_other_priorities_do_not_wait_for_a_jump(windows):
    windows.prioritized = True
    fill_in_vain(windows, ORIGINS[0])
    deep = windows.choose(windows.positions, 10)
    assert sorted(deep) == ORIGINS
    asked = windows.prepare(deep, 10)
    assert ORIGINS[0] not in asked["window_origins"]
    assert ORIGINS[0] in asked["level_origins"]
    assert windows.prepare_jump(windows.positions, 10, [], Floors())
    windows.read_jump(160, (None, None, 0), Flight())
    assert windows.positions[ORIGINS[0]].deep


def test_jumps_go_further_and_further_until_the_end(windows):
    fill_in_vain(windows, ORIGINS[0])
    limits = []
    for _ in range(3):
        asked = windows.prepare_jump(windows.positions, 10, [], Floors())
        limits.append(asked["limit"])
        windows.read_jump(limits[-1], (None, 10_000, limits[-1]), Flight())
    assert limits == [160, 2_560, 40_960]
    windows.prepare_jump(windows.positions, 10, [], Floors())
    windows.read_jump(50_000, (None, 20_000, 5), Flight())
    assert windows.choose(windows.positions, 10) == ORIGINS[1:]
    assert windows.prepare_jump(windows.positions, 10, [], Floors()) is None
