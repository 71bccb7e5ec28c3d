"""What a claim asks for by id."""

from __future__ import annotations

from uuid import UUID

import pytest

from jobs_lib.executor.claiming.claimer import Claimer
from jobs_lib.executor.lane import Lane
from tests.support.claimed import make_claimed

ORIGIN, OTHER = "local/0", "local/1"


@pytest.fixture
def claimer():
    """A claimer that owns one origin."""
    claimer = Claimer(UUID(int=1), UUID(int=2), {})
    claimer.take({ORIGIN: 1})
    return claimer


def test_rows_of_origins_that_must_wait_hold_up_no_others(claimer):
    claimer.take({OTHER: 1})
    claimer.wanted.extra = {1: OTHER, 2: OTHER, 3: ORIGIN}
    claimer.pause({"origin": frozenset([OTHER])})
    claimer.cursors[ORIGIN].seen = True
    _, asked = claimer.prepare(1)
    assert asked["extra_ids"] == "{3}"


def test_nothing_is_asked_for_before_a_look_has_told_what_is_paused(claimer):
    claimer.wanted.extra = {3: ORIGIN}
    claimer.wanted.hurry({7: ORIGIN, 9: OTHER})
    assert claimer.prepare(1) is None
    claimer.cursors[ORIGIN].seen = True
    _, asked = claimer.prepare(1)
    assert asked["extra_ids"] == "{7}"


def test_what_is_taken_back_after_its_origin_has_left_is_not_asked_for(claimer):
    lane = Lane(OTHER, 1, None, 1, UUID(int=2), claimer.finished)
    claimer.take_back(make_claimed(lane, 7))
    assert claimer.wanted.extra == {}
    claimer.in_flight.late[8] = OTHER
    claimer.prepare(1)
    assert claimer.wanted.extra == {}
