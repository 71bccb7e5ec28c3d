"""The formula of the delays; other tests show that the server keeps to them."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from jobs_lib.backoff import RECONNECT, Retry, exponential, rest


def test_the_bound_doubles_from_the_first_to_the_cap():
    policy = exponential(first=1, factor=2, cap=60)
    bounds = [policy.bound(attempt) for attempt in range(1, 9)]
    assert bounds == [1, 2, 4, 8, 16, 32, 60, 60]


def test_another_factor_is_kept():
    policy = exponential(first=0.5, factor=3, cap=100)
    assert [policy.bound(attempt) for attempt in (1, 2, 3)] == [0.5, 1.5, 4.5]


def test_a_factor_of_one_waits_the_same_each_time():
    policy = exponential(first=2, factor=1, cap=60)
    assert {policy.bound(attempt) for attempt in (1, 10, 2**31 - 1)} == {2}


@pytest.mark.parametrize("attempt", [1, 64, 10_000, 2**31 - 1])
def test_many_attempts_neither_overflow_nor_take_long(attempt):
    assert exponential(cap=3_600).bound(attempt) <= 3_600
    assert exponential(factor=1.000001).bound(attempt) <= 3_600


@pytest.mark.parametrize("attempt", [1, 5, 20])
def test_a_delay_lies_anywhere_between_zero_and_the_bound(attempt):
    policy = exponential(first=1, cap=300)
    bound = policy.bound(attempt)
    random.seed(attempt)
    delays = [policy.delay(attempt) for _ in range(4_000)]
    assert all(0 <= delay <= bound for delay in delays)
    assert mean(delays) == pytest.approx(bound / 2, rel=0.05)
    assert min(delays) < 0.05 * bound
    assert max(delays) > 0.95 * bound


def test_a_policy_without_a_maximum_is_never_exhausted():
    assert not Retry().exhausted(10**9)


def test_a_policy_is_exhausted_by_its_last_attempt():
    policy = exponential(max_attempts=3)
    assert [policy.exhausted(attempt) for attempt in (1, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": 0},
        {"first": -1},
        {"factor": 0.5},
        {"first": 10, "cap": 5},
        {"cap": float("inf")},
        {"max_attempts": 0},
        {"first": float("nan")},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_with_its_values(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=rf"{name}.*{value}"):
        exponential(**wrong)


def test_reconnecting_waits_a_few_seconds_at_the_most():
    assert RECONNECT.bound(1) <= 0.5
    assert RECONNECT.bound(1_000) <= 10


def test_the_rest_after_a_slow_poll_lasts_a_second_at_most():
    assert rest(4.0, share=0.05, last=0.0) == 1
    assert rest(0.01, share=0.05, last=0.0) == pytest.approx(0.2)


def test_the_rest_between_slow_polls_grows_up_to_its_share():
    rests = [0.0]
    for _ in range(8):
        rests.append(rest(1.0, share=0.05, last=rests[-1]))
    assert rests[1:] == [1, 2, 4, 8, 16, 20, 20, 20]
