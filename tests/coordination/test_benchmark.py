"""The benchmark: the log that it folds, and the figures that it accepts."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.coordination.bounds import BOUNDS, find_missed
from benchmarks.coordination.folding import PARTITIONS, write_log
from jobs_lib.coordination.messages import encode
from jobs_lib.coordination.world import Outcome, World


@pytest.mark.parametrize("at_most_once", [False, True])
@pytest.mark.parametrize("places", [1, 8])
def test_each_record_of_the_measured_log_is_valid(places, at_most_once):
    worlds = [World(place) for place in range(places)]
    count = 5 * PARTITIONS
    for world in worlds:
        log = write_log(count, places, world.place, at_most_once)
        for offset, message in enumerate(log):
            assert world.apply(offset, offset, encode(message, places)) is Outcome.VALID
        assert world.next_offset == count
    held = itertools.chain.from_iterable(world.entries for world in worlds)
    assert len({*held}) == PARTITIONS // places * places


GOOD = {
    "race_50_winners": 1,
    "race_50_winners_min": 1,
    "takeover_intervals_min": 2.17,
    "takeover_intervals_max": 3,
    "handover_clean_ms": 1_000,
    "fold_events_s": 200_000,
    "consume_vs_group": 0.9,
}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("race_50_winners", 2, "is 2, and must be 1"),
        ("race_50_winners_min", 0, "is 0, and must be 1"),
        ("takeover_intervals_min", 1.99, "is 1.99, and must be from 2 to 3"),
        ("takeover_intervals_max", 3.01, "is 3.01, and must be from 2 to 3"),
        ("handover_clean_ms", 1_001, "is 1001, and must be from 0 to 1,000"),
        ("fold_events_s", 199_999, "is 199999, and must be 200,000 at least"),
        ("consume_vs_group", 0.89, "is 0.89, and must be 0.9 at least"),
        ("consume_vs_group", None, "is nothing, and must be 0.9 at least"),
    ],
)
def test_each_figure_out_of_its_bounds_is_named(name, value, told):
    assert GOOD.keys() == BOUNDS.keys()
    assert find_missed(GOOD) == find_missed({}) == []
    assert find_missed(GOOD | {name: value}) == [f"{name} {told}"]
