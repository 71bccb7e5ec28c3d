"""Which range of a frame a key lies in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_bridge.frames import find_ranges


def find_by_looking(key, ranges):
    for number, (lower, upper) in enumerate(ranges):
        if (lower is None or key >= lower) and (upper is None or key < upper):
            return number
    return -1


@pytest.mark.guarantee("X4")
@pytest.mark.parametrize("of_texts", [False, True])
@given(data=st.data())
def test_each_key_is_in_the_range_whose_bounds_hold_it(of_texts, data):
    one = st.text(max_size=3) if of_texts else st.integers(-20, 20)
    bounds = sorted(data.draw(st.sets(one, min_size=1, max_size=8)))
    parts = list(zip([None, *bounds], [*bounds, None], strict=True))
    # A restart loads only some of the ranges.
    left = data.draw(st.sets(st.sampled_from(range(len(parts))), min_size=1))
    keys = data.draw(st.lists(one, max_size=20))
    ranges = [parts[number] for number in sorted(left)]
    found = find_ranges(
        np.array(keys, object if of_texts else np.int64),
        [lower for lower, _ in ranges if lower is not None],
        [upper for _, upper in ranges if upper is not None],
        sorted(left),
    )
    expected = [find_by_looking(key, parts) for key in keys]
    assert found.tolist() == [one if one in left else -1 for one in expected]
