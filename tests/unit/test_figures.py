"""The arithmetic of the benchmark, and its reading of a server's log."""

from __future__ import annotations

import pytest

from benchmarks.figures import best, bucketed, median, percentile, ratio
from benchmarks.measures.held_xmin import make_curve
from benchmarks.pieces import join_logs


def test_the_median_is_the_middle_one_or_between_the_two_in_the_middle():
    assert median([5.0, 1.0, 3.0]) == 3.0
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5


def test_a_round_that_failed_does_not_count_in_the_median():
    assert median([1.0, None, 3.0, 2.0]) == 2.0
    assert median([None]) is None


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 50), (0.99, 99), (1, 100), (0.001, 1), (0.991, 100)]
)
def test_a_percentile_is_a_value_that_was_measured(share, expected):
    assert percentile(range(100, 0, -1), share) == expected


def test_a_percentile_of_few_values_is_the_worst_of_them():
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([], 0.5) is None


@pytest.mark.parametrize("share", [0, -0.5, 1.01, 99])
def test_a_share_outside_of_its_bounds_is_refused(share):
    with pytest.raises(ValueError, match="a share is more than 0 and 1 at the most"):
        percentile([1.0], share)


def test_a_ratio_needs_both_figures():
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(0.0, 2.0) == 0.0
    assert ratio(None, 2.0) is None
    assert ratio(3.0, None) is None
    assert ratio(3.0, 0.0) is None


def test_the_best_is_the_highest_or_the_lowest_measured_median():
    medians = {"a": 2.0, "b": None, "c": 3.0}
    assert best(medians) == ("c", 3.0)
    assert best(medians, lowest=True) == ("a", 2.0)
    assert best({"b": None}) is None


def test_points_are_put_into_spans_by_their_time():
    points = [(0.0, 1.0), (9.9, 2.0), (10.0, 3.0), (35.0, 4.0)]
    assert bucketed(points, 10) == [(0, [1.0, 2.0]), (10, [3.0]), (30, [4.0])]


def test_a_curve_counts_jobs_when_they_started_not_when_they_were_sent():
    # Both were sent in the first span; one waited until the second.
    curve = make_curve([(0.0, 1.0), (9.0, 2_000.0)], 10)
    assert [(point["at_s"], point["jobs_s"]) for point in curve] == [
        (0, 0.1),
        (10, 0.1),
    ]
    assert curve[1]["p99_ms"] == 2_000.0


def test_a_wait_is_from_the_commit_to_the_first_start(tmp_path):
    sent, started = tmp_path / "sent", tmp_path / "started"
    sent.write_text("0 1000000 5000000\n1 6000000 7000000\n2 8000000 9000000\n")
    # Job 0 ran twice, and job 2 never. Job 1 began before its commit had returned.
    warm_up = "0 100\n1 200\n"
    started.write_text(warm_up + "1 6900000\n0 7500000\n0 9000000\n")
    assert join_logs(sent, started, len(warm_up)) == [(0.0, 2.5), (0.002, 0.0)]
