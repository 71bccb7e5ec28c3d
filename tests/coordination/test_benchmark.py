"""The log that the benchmark folds is one that members would write."""

from __future__ import annotations

import itertools

import pytest

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
