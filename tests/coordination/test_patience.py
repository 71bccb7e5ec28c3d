"""A wait is not over because the process stood still."""

from __future__ import annotations

import math

import pytest

from jobs_lib.coordination import patience
from jobs_lib.coordination.patience import Patience, Standstill
from tests.support.clock import Clock


@pytest.fixture
def clock(monkeypatch):
    """A clock of elapsed time, which stands at 100."""
    clock = Clock()
    monkeypatch.setattr(patience, "read_clock", clock.monotonic)
    return clock


@pytest.mark.guarantee("M10")
def test_a_stop_takes_five_seconds_at_most(clock):
    left = Patience(30.0)
    clock.now += 3_600.0
    assert not left.is_over
    clock.now += 3_600.0
    assert not left.is_over


def test_a_wait_is_over_after_its_seconds(clock):
    left = Patience(30.0)
    for _ in range(29):
        clock.now += 1.0
        assert not left.is_over
    clock.now += 1.0
    assert left.is_over


@pytest.mark.guarantee("M10")
def test_a_standstill_goes_on_until_its_thread_says_so(clock):
    standstill = Standstill(10.0)
    for _ in range(5):
        clock.now += 9.9
        standstill.note()
    assert standstill.ended_at == -math.inf
    clock.now += 10.0
    assert standstill.ended_at == clock.now
    clock.now += 5.0
    assert standstill.ended_at == clock.now
    standstill.note()
    ended_at = clock.now
    clock.now += 1.0
    standstill.note()
    assert standstill.ended_at == ended_at
