"""Histograms: each number lies in the first bucket whose bound is not below it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs_lib.executor.meter import BOUNDS, Histogram

SECONDS = st.lists(
    st.one_of(
        st.floats(-1.0, 400.0), st.floats(0.0, 0.003), st.sampled_from([*BOUNDS, 0.0])
    ),
    max_size=20,
)


def find_bucket(seconds: float) -> int:
    """The bucket of a number."""
    reached = [place for place, bound in enumerate(BOUNDS) if seconds <= bound]
    return min(reached, default=len(BOUNDS))


@given(SECONDS, st.sampled_from([0.0, 0.25, -0.25]))
def test_each_number_is_in_its_bucket(numbers, shift):
    histogram = Histogram()
    histogram.note([*numbers], shift)
    expected = [0] * (len(BOUNDS) + 1)
    # Two clocks may yield a negative time, which counts as zero.
    shifted = [max(0.0, number + shift) for number in numbers]
    for number in shifted:
        expected[find_bucket(number)] += 1
    assert histogram.counts == expected
    assert histogram.total == pytest.approx(math.fsum(shifted))
