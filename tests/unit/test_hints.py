"""The enqueues that hint executors, with a clock of their own."""

from __future__ import annotations

import pytest

from jobs_lib.postgres.hints import EVERYWHERE, Hints


class Clock:
    """A clock that stands still until a test moves it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    """The clock of the hints."""
    return Clock()


@pytest.fixture
def hints(clock):
    """Hints of a process that has just started."""
    return Hints(clock)


def test_an_origin_is_hinted_at_once_per_interval(hints, clock):
    assert hints.choose("a/1") == "a/1"
    assert hints.choose("a/1") is None
    # Another origin gets its hint at once.
    assert hints.choose("a/2") == "a/2"
    clock.now += 0.004
    assert hints.choose("a/1") is None
    clock.now += 0.002
    assert hints.choose("a/1") == "a/1"


def test_the_next_hint_covers_many_origins_together(hints, clock):
    told = [hints.choose(f"a/{n}") for n in range(100)]
    assert told == [*(f"a/{n}" for n in range(8)), *[None] * 92]
    clock.now += 0.006
    assert hints.choose("a/99") == EVERYWHERE
    assert hints.choose("a/98") is None
    clock.now += 1
    assert hints.choose("a/5") == EVERYWHERE
    assert hints.choose("a/6") == "a/6"


def test_a_flood_over_many_origins_has_one_hint_per_interval(hints, clock):
    told = 0
    for n in range(10_000):
        clock.now += 0.0001
        told += hints.choose(f"a/{n % 100}") is not None
    assert told <= 1.0 / 0.005 + 8
