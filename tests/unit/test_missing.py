"""Versions that grow by one: a gap is a record that was never read."""

from __future__ import annotations

import pytest

from jobs_lib.consuming.changes import Changes, Missing, find_missing


@pytest.mark.guarantee("W58")
@pytest.mark.parametrize(
    ("versions", "known", "missing"),
    [
        ([(1, 10), (2, 11)], None, None),
        ([(7, 10)], None, None),
        ([(7, 10), (9, 11)], None, Missing(1, 11, 7, 9)),
        ([(8, 10)], 7, None),
        ([(10, 10)], 7, Missing(2, 10, 7, 10)),
        # Repeats and late ones are no gaps.
        ([(7, 10), (3, 11), (8, 12)], 7, None),
        ([(8, 10), (3, 11), (9, 12)], 7, None),
        ([(9, 10), (12, 11)], 7, Missing(3, 10, 7, 9)),
    ],
)
def test_gaps_are_counted_and_the_first_is_named(versions, known, missing):
    changes = Changes(0, versions={"k": versions})
    assert find_missing(changes, {} if known is None else {"k": known}) == missing


@pytest.mark.guarantee("W58")
def test_the_first_gap_is_that_of_the_lowest_offset():
    changes = Changes(0, versions={"a": [(1, 5), (3, 9)], "b": [(4, 6), (6, 8)]})
    assert find_missing(changes, {}) == Missing(2, 8, 4, 6)
